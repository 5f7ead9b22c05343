"""Tables of what diagnoses say: of the real code, of the same code changed, and of sources that are like it."""

from __future__ import annotations

import contextlib
import importlib
from unittest import mock

import pytest

NOTHING = "there = 'nothing'"
"""The source of a module without any of the names that a diagnosis looks for."""
GONE = object()
"""The value of a name that is not there."""


def words(verdict):
    """Return the verdict and its reason, which can be sent between processes."""
    return verdict.kind.value, verdict.reason


def assert_verdicts(found, expected):
    """Compare {case: (verdict, reason)} with {case: (verdict, words of the reason)}."""
    assert found.keys() == expected.keys()
    for case, (kind, text) in expected.items():
        assert found[case][0] == kind, (case, found[case])
        assert text in found[case][1], (case, found[case])


# ------------------------------------------------------------------------------------------ sources
def each_source(table):
    """Parametrize a test with the rows of {diagnosis: {case: (source, verdict, words of the reason)}}.

    The test takes `source_case`, and calls assert_verdict_of_source() with it.
    """
    names = [case for rows in table.values() for case in rows]
    assert len(names) == len(set(names))
    cases = [(diagnose, *row) for diagnose, rows in table.items() for row in rows.values()]
    return pytest.mark.parametrize("source_case", cases, ids=names)


def assert_verdict_of_source(source_case, modules):
    """Write the source, import it, and compare what the diagnosis says of it with what the row expects."""
    diagnose, source, kind, text = source_case
    verdict = diagnose(importlib.import_module(modules.write(source)))
    assert_verdicts({"source": words(verdict)}, {"source": (kind, text)})


# ------------------------------------------------------------------------------------------ the code that is there
def made_up(holder, name, *functions):
    """Return the changes that put each of the functions in the place of `name`, by the functions' own names."""
    return {function.__name__: (holder, name, function) for function in functions}


def verdicts_of(diagnose, module, changes):
    """Return {case: (verdict, reason)} of the module as it is, and with the changes.

    changes   by case, (holder, name, value), or a list of these, which are made together; GONE is a value
    """
    found = {"as it is": words(diagnose(module))}
    for case, change in changes.items():
        with contextlib.ExitStack() as stack:
            for holder, name, value in change if isinstance(change, list) else [change]:
                stack.enter_context(mock.patch.object(holder, name, value))
                if value is GONE:
                    delattr(holder, name)
            found[case] = words(diagnose(module))
    return found


def of_a_rank(verdicts, **options):
    """Return what a rank finds. A second look, through megapatch's patches, gives the same answers."""
    from megapatch.testing import run_ranks  # not above: tables of sources need no torch
    from rigs.megatron.options import UNPATCHED

    (unpatched,), (patched,) = (run_ranks(verdicts, 1, env=env, **options) for env in (UNPATCHED, {}))
    assert patched == unpatched
    return patched
