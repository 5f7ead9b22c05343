"""megapatch makes Megatron safe to call repeatedly.

    import megapatch          # before training; everything else happens when Megatron is imported

Importing it activates: every patch is considered as soon as the module that it repairs has been imported,
before or after this line. It imports neither torch nor megatron.
"""

from __future__ import annotations

from .catalog import PATCHES
from .engine import Engine
from .install import RestoreError
from .patch import MegapatchError
from .report import Report, make_report  # before `report` below: importing the module binds that name, too
from .settings import Settings

__version__ = "0.1.0"
__all__ = ["MegapatchError", "Report", "RestoreError", "activate", "apply", "report", "restore"]

_engine = Engine(PATCHES, Settings.from_environment())


def activate(*ignored: object, **also_ignored: object) -> None:
    """Do what `import megapatch` does. Takes and ignores any arguments, so that it can be named as a
    framework's init hook (slime: ``--custom-megatron-init-path megapatch.activate``)."""
    _engine.activate()


def apply() -> Report:
    """Look again at every target that is loaded now: after `importlib.reload`, after `restore`, or when a
    module was half-imported before. What is in place stays as it is. Returns the report."""
    _engine.apply()
    return report()


def restore(*names: str) -> None:
    """Put back the identical original objects of the named patches (names or globs; without any, of all).

    They stay away until `apply()`. Raises MegapatchError for an unknown name, and RestoreError, with nothing
    changed, when someone has patched on top of megapatch.
    """
    _engine.restore(*names)


def report() -> Report:
    """What megapatch did in this process, patch by patch, and why."""
    return make_report(_engine.records)


activate()
