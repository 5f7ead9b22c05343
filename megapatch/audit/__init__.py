"""A sanitizer for training with Megatron: it finds steps that break Megatron's own rules, whoever breaks them.

    MEGAPATCH_AUDIT=1 python train.py        # or megapatch.audit.start() before the model is wrapped
    megapatch.audit.findings()               # what was found in this process

Patches repair what somebody has reported. The audit watches what such defects have in common: each bucket is
reduced once a step, the loss is scaled by what its gradients are divided by, parameters are the same on all ranks.
It looks at Megatron's own objects, beneath all patches, and changes nothing. docs/audit.md lists the rules.
"""

from __future__ import annotations

import atexit

from .._engine.engine import this_process
from . import (
    _calls,
    _checkpoints,
    _gathers,
    _generation,
    _gradients,
    _ranks,
    _scales,
    _steps,
    _tokens,
    _weights,
)
from ._findings import LEDGER, Finding
from ._invariants import INVARIANTS, Invariant
from ._weights import compare_weights, weights_digest

__all__ = [
    "INVARIANTS",
    "Finding",
    "Invariant",
    "clear",
    "compare_weights",
    "findings",
    "start",
    "stop",
    "weights_digest",
]

_PARTS = (
    _gradients,
    _gathers,
    _steps,
    _scales,
    _calls,
    _ranks,
    _tokens,
    _checkpoints,
    _generation,
    _weights,
)
_WATCHERS = tuple(part.PATCH for part in _PARTS)


def start(every: int | None = None, raises: bool = False) -> None:
    """Watch from now on. Call it before the model is wrapped in DistributedDataParallel, on all ranks.

    Patches that are in place are taken off for a moment, so that the audit lies beneath them: call it while no
    training runs.

    Args:
        every: how many optimizer steps lie between two comparisons of the ranks; None for MEGAPATCH_AUDIT_EVERY,
            or 50 without it.
        raises: whether what one rank has found raises AuditError on all ranks, in the next optimizer step. Then
            ranks ask each other in every step, which waits for the GPU.

    Raises:
        MisuseError: for `every` below 1.
        RestoreError: when someone else has patched on top of megapatch; nothing is changed then.
    """
    _ranks.configure(every, raises)
    engine = this_process()
    if _WATCHERS[0] not in engine.patches:
        engine.put_beneath(_WATCHERS)
        atexit.register(_summarize)


def stop() -> None:
    """Stop watching; what was found stays.

    Raises:
        RestoreError: as `start`.
    """
    this_process().take_away(_WATCHERS)
    atexit.unregister(_summarize)


def findings() -> list[Finding]:
    """Return what was found in this process since it began, in the order in which it was first seen."""
    _judge()
    return LEDGER.findings()


def _summarize() -> None:
    _judge()
    LEDGER.summarize()


def _judge() -> None:
    _tokens.judge()
    _generation.judge()


def clear() -> None:
    """Forget what was found, for instance once it has been reported. Call it on all ranks."""
    _judge()
    LEDGER.clear()
    _ranks.forget()
