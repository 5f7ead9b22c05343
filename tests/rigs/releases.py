"""The releases of a framework that variables name: the folder of its wheels, and a checkout."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megapatch import report
from rigs.imported import run_with_megatron
from rigs.variables import folder_in


@dataclass(frozen=True)
class Release:
    """A release, and the folder that would stand on PYTHONPATH."""

    name: str
    folder: str

    def ranks_of(self, variable, function, world_size, *args, env=None, **options):
        """Call run_with_megatron in processes that find this release in the variable."""
        return run_with_megatron(
            function, world_size, *args, env={**(env or {}), variable: self.folder}, **options
        )


def releases(framework, kind=Release, within=lambda checkout: checkout):
    """Return those in the folder of the framework's releases, and its checkout, as the variables name them.

    kind     the class of each
    within   returns the folder for PYTHONPATH in a checkout
    """
    found = []
    if wheels := folder_in(f"{framework}_RELEASES"):
        # The oldest first: skyrl was called skyrl_train before.
        folders = sorted(Path(wheels).iterdir(), key=lambda path: path.name.replace("_", " "))
        found += [kind(path.name, str(path)) for path in folders]
    if checkout := folder_in(f"{framework}_CHECKOUT"):
        found.append(kind("checkout", str(within(checkout))))
    return found


def needs(framework, found):
    """Return the mark of tests that are skipped where no release was found."""
    reason = f"neither {framework}_RELEASES nor {framework}_CHECKOUT is set"
    return pytest.mark.skipif(not found, reason=reason)


def find_release(variable):
    """Make the release in the variable importable, before its stand-ins are."""
    import_before_stand_ins()
    sys.path.insert(0, os.environ[variable])


def import_before_stand_ins():
    """Import what in Megatron looks for what is installed, and would take a stand-in for it."""
    for name in ("gpt_model", "gpt_layer_specs"):
        importlib.import_module(f"megatron.core.models.gpt.{name}")


def statuses(*families):
    """Return the patches' statuses in this process by their names: of these families, or of all."""
    found = report().to_dict()["patches"]
    return {one["name"]: one["status"] for one in found if not families or one["name"].split(".")[0] in families}


def status_of(name):
    return statuses()[name]
