"""Verdicts on the real code, and on the same code changed."""

import contextlib
from unittest import mock

from megapatch._verify.check import DefectSeen
from rigs.diagnosed_sources import verdict_of, words
from rigs.imported import run_with_megatron

GONE = object()
"""The value of a name that is not there."""


def made_up(holder, name, *functions):
    """Return the changes that put each of the functions in the place of `name`, by the functions' own names."""
    return {function.__name__: (holder, name, function) for function in functions}


def verdicts_of(diagnose, module, changes):
    """Return {case: (verdict, reason)} of the module with the changes. As it is tests/test_verdicts.py knows it.

    changes   by case, (holder, name, value), or a list of these, which are made together; GONE is a value
    """
    found = {}
    for case, change in changes.items():
        with contextlib.ExitStack() as stack:
            for holder, name, value in change if isinstance(change, list) else [change]:
                stack.enter_context(mock.patch.object(holder, name, value))
                if value is GONE:
                    delattr(holder, name)
            found[case] = words(verdict_of(diagnose, module))
    return found


def of_a_rank(verdicts, **options):
    """Return what a rank finds. That a second look gives the same answers is part of the contract."""
    (found,) = run_with_megatron(verdicts, 1, **options)
    return found


def seen_by(rank, world_size, scenario):
    """The words of the defect that a scenario of `megapatch verify` meets; None where it meets none."""
    try:
        scenario()
    except DefectSeen as seen:
        return str(seen)
