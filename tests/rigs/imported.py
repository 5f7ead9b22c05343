"""Ranks that have imported Megatron when they begin."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

from megapatch._python.finding import find_module
from megapatch.patches import _catalogue
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


def of_family(name):
    """Mark the setup of a rank as one that makes the modules importable that a family of patches is for.

    It is done, and these are imported, once for all ranks with the same variables, where they are forked from.
    """

    def mark(setup):
        setup.family = name
        return setup

    return mark


def run_with_megatron(function, world_size, *args, **options):
    """`run_ranks` in ranks that have imported Megatron when they begin, or what a marked setup is for as well.

    With any other `setup` they have imported nothing: it may have to come before Megatron.

    Tests of imports, of what a program does from its first line, and of files that a process begins then
    (MEGAPATCH_REPORT) call `run_ranks` itself.
    """
    setup, variables = options.get("setup"), options.get("env") or {}
    marks = vars(setup) if setup else {"after_megatron": True}
    if not marks or options.get("device", "cpu") != "cpu" or missing():
        return run_ranks(function, world_size, *args, **options)
    environment, then = {**os.environ, **variables}, ""
    if "family" in marks:
        # What it finds may depend on the variables, and servers are told apart by this text.
        of_setup = setup.__module__, setup.__name__, marks["family"]
        then = f"from rigs.imported import _set_up\n_set_up{of_setup}  # {sorted(variables.items())}"
        options["setup"] = _find_the_same
    with forked_with(environment, PACKAGE_ALONE if environment.keys() & WITHOUT_MEGAPATCH else "", then):
        return run_ranks(function, world_size, *args, **options)


_path = []


def _set_up(module, name, family):
    getattr(importlib.import_module(module), name)()
    modules = {site.module for patch in _catalogue.of_family(family) for site in patch.sites}
    for each in filter(find_module, sorted(modules)):
        with contextlib.suppress(Exception):  # each rank meets the same error, and says so
            importlib.import_module(each)
    _path.extend(sys.path)


def _find_the_same():
    """Take the path back, of which multiprocessing makes the caller's."""
    sys.path[:] = _path
