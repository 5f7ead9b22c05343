"""megapatch makes Megatron safe to call repeatedly.

    import megapatch          # before training; everything else happens when Megatron is imported

Importing it activates: every patch is considered as soon as the module that it repairs has been imported,
before or after this line. It imports neither torch nor megatron.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036  (a checkout on PYTHONPATH has no installer that refuses)
    raise ImportError(f"megapatch needs Python 3.10 or later; this is {sys.version.split()[0]}")

from .engine import this_process
from .install import RestoreError
from .patch import (
    ABSENT,
    FIXED,
    NEEDED,
    UNKNOWN,
    UNSUPPORTED,
    MegapatchError,
    Patch,
    Site,
    Verdict,
    unpatched,
)
from .report import Report, make_report  # before `report` below: importing the module binds that name, too
from .strict import StrictError

if TYPE_CHECKING:
    from .agreement import InconsistentError, assert_consistent
    from .train_step import TrainStep

__version__ = "0.1.0"
__all__ = [
    "ABSENT",
    "FIXED",
    "NEEDED",
    "UNKNOWN",
    "UNSUPPORTED",
    "InconsistentError",
    "MegapatchError",
    "Patch",
    "Report",
    "RestoreError",
    "Site",
    "StrictError",
    "TrainStep",
    "Verdict",
    "activate",
    "apply",
    "assert_consistent",
    "report",
    "restore",
    "unpatched",
]


_ON_FIRST_USE = {  # most processes that import megapatch have none
    "TrainStep": ".train_step",
    "InconsistentError": ".agreement",
    "assert_consistent": ".agreement",
}


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        from importlib import import_module

        return getattr(import_module(_ON_FIRST_USE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def activate(*ignored: object, **also_ignored: object) -> None:
    """Do what `import megapatch` does. Takes and ignores any arguments, so that it can be named as a
    framework's init hook (slime: ``--custom-megatron-init-path megapatch.activate``).

    Raises StrictError with MEGAPATCH_STRICT when a patch failed, was refused or overwritten.
    """
    this_process().activate()


def apply() -> None:
    """Look again at every target that is loaded now: after `importlib.reload`, after `restore`, or when a
    module was half-imported before. What is in place stays as it is.

    Raises StrictError with MEGAPATCH_STRICT when a patch failed, was refused or overwritten.
    """
    this_process().apply()


def restore(*names: str) -> None:
    """Put back the identical original objects of the named patches (names or globs; without any, of all).

    They stay away until `apply()`. Raises MegapatchError for an unknown name, and RestoreError, with nothing
    changed, when someone has patched on top of megapatch.
    """
    this_process().restore(*names)


def report() -> Report:
    """What megapatch did in this process, patch by patch, and why.

    Also says who holds an original function out of reach, for which it goes through all objects of the process:
    about a tenth of a second once torch is loaded.
    """
    return make_report(this_process().records)


activate()
