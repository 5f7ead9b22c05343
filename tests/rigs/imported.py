"""Ranks that have imported Megatron when they begin."""

from __future__ import annotations

import importlib
import os
import sys

from megapatch._python.finding import find_module
from megapatch.testing import run_ranks
from megapatch.testing._imported import forked_with
from rigs.where import missing

WITHOUT_MEGAPATCH = {"RIGS_WITHOUT_MEGAPATCH": "1"}
"""The environment of ranks that never activate megapatch, and import only its helpers for tests."""

# The package without its body, which would activate it: modules below it can be imported.
PACKAGE_ALONE = """
import importlib.util, sys
sys.modules["megapatch"] = importlib.util.module_from_spec(importlib.util.find_spec("megapatch"))
"""


def after_megatron(setup):
    """Mark the setup of a rank as one that does the same when Megatron has been imported before it."""
    setup.after_megatron = True
    return setup


def run_with_megatron(function, world_size, *args, imports=(), **options):
    """`run_ranks` in ranks that have imported Megatron when they begin.

    With a `setup` they have only if that is marked with `after_megatron`: others come before Megatron.

    imports   modules that they have imported as well, after the setup, which is done where ranks are forked from

    Tests of imports, of what a program does from its first line, and of files that a process begins then
    (MEGAPATCH_REPORT) call `run_ranks` itself.
    """
    setup = options.get("setup")
    comes_first = setup is not None and not getattr(setup, "after_megatron", False) and not imports
    if comes_first or options.get("device", "cpu") != "cpu" or missing():
        return run_ranks(function, world_size, *args, **options)
    given = options.get("env") or {}
    environment = {**os.environ, **given}
    first, then = PACKAGE_ALONE if environment.keys() & WITHOUT_MEGAPATCH else "", ""
    if imports and setup:
        of_setup = setup.__module__, setup.__name__, *imports
        # What it sets up may depend on the variables, and servers are told apart by this text.
        then = f"from rigs.imported import _set_up\n_set_up{of_setup}  # {sorted(given.items())}"
        options["setup"] = _find_the_same
    with forked_with(environment, first, then):
        return run_ranks(function, world_size, *args, **options)


def _set_up(module, name, *imports):
    getattr(importlib.import_module(module), name)()
    for each in filter(find_module, imports):
        importlib.import_module(each)
    _path.extend(sys.path)


_path = []


def _find_the_same():
    """Take the path back, of which multiprocessing makes the caller's."""
    sys.path[:] = _path
