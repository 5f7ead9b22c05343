"""A sanitizer for training with Megatron: it finds steps that break Megatron's own rules, in any trainer.

    MEGAPATCH_AUDIT=1 python train.py        # or megapatch.audit.start() before the model is wrapped
    megapatch.audit.findings()               # the findings in this process
    print(megapatch.audit.report())          # with their likely causes, and what else happened

Patches repair known defects. The audit watches the rules that such defects break. Each bucket is reduced once a
step. The loss is multiplied by the scale that its gradients are divided by. Parameters are the same on all ranks.
It looks at Megatron's own objects, beneath all patches, and changes none. docs/audit.md lists the rules.
"""

from __future__ import annotations

import atexit
import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._engine.engine import this_process
from .._engine.settings import REPORT
from .._version import see
from ._audit import Audit, Part, part_of
from ._findings import Finding, Ledger, Repair
from ._rules import RULES, Rule
from ._settings import Settings, settings_for

if TYPE_CHECKING:
    from ._report import AuditReport, RuleStatus

log = logging.getLogger("megapatch")

__all__ = [
    "RULES",
    "AuditReport",
    "Finding",
    "Repair",
    "Rule",
    "RuleStatus",
    "clear",
    "findings",
    "notes",
    "report",
    "start",
    "stop",
]

_ORDER = (
    "gradients scaled_once "  # gradients first: the others ask a step whether it has any
    "ranks_agree gathered_when_read "  # ranks may raise; then the step leaves nothing to be gathered
    "offloads step_begins "  # this looks more closely after an offload
    "loaded_is_there training_mode microbatches saves weight_syncs "
    "calls"  # leaves a report of what the others have found
)
"""The modules of an audit's parts, in the order in which these see what happens."""
_PARTS: tuple[type[Part], ...] = tuple(
    part_of(import_module(f"{__name__}._{module}")) for module in _ORDER.split()
)


class _Process:
    """The audit that watches this process, if there is one, and what is known of the latest."""

    def __init__(self) -> None:
        self.audit: Audit | None = None
        self.ledger = Ledger()
        self.settings: Settings | None = None
        self.statuses: tuple[RuleStatus, ...] = ()  # of the rules, when it ended
        self._pid = os.getpid()
        self._has_failed = False

    def report(self, ended: bool = False) -> AuditReport:
        """Return the report as it is now, without judging what waits for it."""
        from ._report import make, statuses  # most processes that train make none

        found = statuses(self.ledger, self.audit) if self.audit or not self.statuses else self.statuses
        return make(self.ledger, self.settings, found, ended or self.audit is None)

    def leave(self, ended: bool = False) -> None:
        """Leave the report of a process that trains for `megapatch audit`. A failure is logged, once."""
        folder = os.environ.get(REPORT)
        if not folder or os.getpid() != self._pid:  # a forked child would write over its parent's
            return
        if not (self.ledger.step or self.ledger.findings() or self.ledger.notes()):
            return
        try:
            from ._report import write

            write(folder, self.report(ended))
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                reason = f"{type(error).__name__}: {error}"
                log.warning(
                    "audit: no report is left in %s: %s; training goes on" + see("audit-report"), folder, reason
                )


_PROCESS = _Process()


def __getattr__(name: str) -> Any:
    """Return the types of reports, which most processes that train do not load."""
    if name in ("AuditReport", "RuleStatus"):
        from . import _report

        return getattr(_report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def start(every: int | None = None, raises: bool = False) -> None:
    """Watch from now on. Call it before the model is wrapped in DistributedDataParallel, on all ranks.

    Patches that are in place are taken off for a moment, so that the audit lies beneath them: call it while no
    training runs. While the audit watches, another call changes its settings only. After `stop` it begins with
    nothing: earlier findings are forgotten.

    Args:
        every: optimizer steps from one comparison of the ranks to the next; None for MEGAPATCH_AUDIT_EVERY, or 50
            without it.
        raises: whether a finding of one rank raises AuditError on all ranks, in the next optimizer step. Then
            ranks ask each other in every step, which waits for the GPU.

    Raises:
        MisuseError: for `every` below 1.
        RestoreError: when someone else has patched on top of megapatch; nothing is changed then.
    """
    settings = settings_for(every, raises)
    if _PROCESS.audit is not None:
        _PROCESS.audit.settings = _PROCESS.settings = settings
        return
    audit = Audit(_PARTS, settings)
    this_process().install_below(audit.patches)
    _PROCESS.audit, _PROCESS.ledger, _PROCESS.settings = audit, audit.ledger, settings
    audit.ledger.changed = _PROCESS.leave
    atexit.register(_summarize)


def stop() -> None:
    """Stop watching. The findings stay until the next `start`.

    Raises:
        RestoreError: as `start`.
    """
    audit = _PROCESS.audit
    if audit is None:
        return
    from ._report import statuses

    _judge()
    _PROCESS.statuses = statuses(audit.ledger, audit)  # while its patches are in place
    this_process().install_below(())
    _PROCESS.audit = None
    atexit.unregister(_summarize)
    audit.end()
    _PROCESS.leave(ended=True)


def findings() -> list[Finding]:
    """Return the findings in this process since the audit began, in the order in which they were first seen."""
    _judge()
    return _PROCESS.ledger.findings()


def notes() -> list[Finding]:
    """Return what a trainer may do on purpose or by mistake, in the order in which it was first seen.

    Names in MEGAPATCH_AUDIT_ACCEPT, separated by commas, are left out, of findings, too. A note raises nothing.
    """
    _judge()
    return _PROCESS.ledger.notes()


def report() -> AuditReport:
    """Report what the audit has watched and found here. `print` it for people; its `to_dict` is for programs.

    It names, for each finding, the user's code and the likely causes. With MEGAPATCH_REPORT=FOLDER each rank
    leaves it there, for ``megapatch audit FOLDER``. It does so after steps 1, 2, 4, 8 and so on, about once a
    minute, when something is found, and at its end.
    """
    _judge()
    return _PROCESS.report()


def clear() -> None:
    """Forget the findings and notes, for instance once they have been reported. Call it on all ranks."""
    _judge()
    _PROCESS.ledger.clear()
    if _PROCESS.audit is not None:
        _PROCESS.audit.forget()


def _judge() -> None:
    if _PROCESS.audit is not None:
        with _PROCESS.ledger.looking_back():
            _PROCESS.audit.judge()


def _summarize() -> None:
    _judge()
    _PROCESS.ledger.summarize()
    _PROCESS.leave(ended=True)
