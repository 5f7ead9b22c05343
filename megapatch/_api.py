"""The calls of a user in a process: activate, apply, restore, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._engine.engine import this_process
from ._engine.settings import RAISE

if TYPE_CHECKING:
    from ._reporting.report import Report


def activate(*ignored: object, **also_ignored: object) -> None:
    """Install the patches, as `import megapatch` does.

    Takes and ignores any arguments, so that it can be named as a framework's init hook (slime:
    ``--custom-megatron-init-path megapatch.activate``).

    Raises:
        StrictError: with MEGAPATCH_STRICT, when a patch failed, was refused, missed or overwritten.
    """
    engine = this_process()
    if engine.settings.audit:
        from .audit import start  # off, it costs nothing

        start(raises=engine.settings.audit_value == RAISE)
    engine.activate()


def apply() -> None:
    """Look again at every target that is loaded now; patches in place stay as they are.

    For after `importlib.reload`, after `restore`, or when a module was half-imported before.

    Raises:
        StrictError: with MEGAPATCH_STRICT, when a patch failed, was refused, missed or overwritten.
    """
    this_process().apply()


def restore(*names: str) -> None:
    """Put back the identical original objects of the named patches, until `apply()`.

    Args:
        *names: patch names or globs such as ``"megatron.*"``; without any, all patches. The audit always stays:
            only `megapatch.audit.stop` takes it away.

    Raises:
        MegapatchError: for a name that stands for no patch, such as that of a part of the audit.
        RestoreError: when someone has patched on top of megapatch; nothing is changed then.
    """
    this_process().restore(*names)


def report() -> Report:
    """Report what megapatch did in this process, patch by patch, and why. `print` it for a table.

    The report also names who holds an original function out of reach. Finding out takes a look at all objects of
    the process: about a tenth of a second once torch is loaded.
    """
    from ._reporting.report import make_report  # most processes never ask

    this_process().load_families()
    return make_report(this_process().records)
