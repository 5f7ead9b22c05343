"""Ranks that have imported Megatron when they begin."""

from __future__ import annotations

import os

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


def run_with_megatron(function, world_size, *args, **options):
    """`run_ranks` in ranks that have imported Megatron when they begin.

    With a `setup` they have only if that is marked with `after_megatron`: others come before Megatron.

    Tests of imports, and of what a program does from its first line, call `run_ranks` itself; so do runs that are
    the only ones with their MEGAPATCH_*, for which a server would not pay.
    """
    setup = options.get("setup")
    comes_first = setup is not None and not getattr(setup, "after_megatron", False)
    if comes_first or options.get("device", "cpu") != "cpu" or missing():
        return run_ranks(function, world_size, *args, **options)
    environment = {**os.environ, **(options.get("env") or {})}
    with forked_with(environment, PACKAGE_ALONE if environment.keys() & WITHOUT_MEGAPATCH else ""):
        return run_ranks(function, world_size, *args, **options)
