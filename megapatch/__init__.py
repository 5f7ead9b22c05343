"""megapatch makes Megatron safe to call repeatedly.

    import megapatch          # before training; everything else happens when Megatron is imported

Importing it activates: every patch is considered as soon as the module that it repairs has been imported,
before or after this line. It imports neither torch nor megatron.

A name without a leading underscore is promised to users; docs/api.md lists them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036  (a checkout on PYTHONPATH has no installer that refuses)
    raise ImportError(f"megapatch needs Python 3.10 or later; this is {sys.version.split()[0]}")

try:
    from ._api import activate, apply, report, restore
except ModuleNotFoundError as error:
    from ._engine.edges import is_the_command, say

    if not is_the_command():
        raise
    say(f"megapatch needs {error.name}, which is not installed here: pip install {error.name}")
    sys.exit(2)
from ._version import __version__
from .errors import InconsistentError, MegapatchError, MisuseError, RestoreError, StrictError
from .patch import ABSENT, FIXED, NEEDED, UNKNOWN, UNSUPPORTED, Patch, Site, Status, Verdict, unpatched

if TYPE_CHECKING:
    from . import audit, errors, patch, patches, reach, streaming, testing, train_step, weight_sync
    from ._reporting.agreement import assert_consistent
    from ._reporting.check import check
    from ._reporting.report import Report
    from .train_step import TrainStep

__all__ = [
    "ABSENT",
    "FIXED",
    "NEEDED",
    "UNKNOWN",
    "UNSUPPORTED",
    "InconsistentError",
    "MegapatchError",
    "MisuseError",
    "Patch",
    "Report",
    "RestoreError",
    "Site",
    "Status",
    "StrictError",
    "TrainStep",
    "Verdict",
    "__version__",
    "activate",
    "apply",
    "assert_consistent",
    "audit",
    "check",
    "errors",
    "patch",
    "patches",
    "reach",
    "report",
    "restore",
    "streaming",
    "testing",
    "train_step",
    "unpatched",
    "weight_sync",
]

# Most processes that import megapatch use none of these, so they are loaded on first use.
_PLACES = {
    "Report": "._reporting.report",
    "TrainStep": ".train_step",
    "assert_consistent": "._reporting.agreement",
    "check": "._reporting.check",
}
_SUBPACKAGES = ("audit", "reach", "streaming", "testing", "train_step", "weight_sync")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _PLACES:
        return getattr(import_module(_PLACES[name], __name__), name)
    if name in _SUBPACKAGES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


activate()
