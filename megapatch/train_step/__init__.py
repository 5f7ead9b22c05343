"""One optimizer step from any number of forward-backward calls: see `TrainStep`."""

from __future__ import annotations

from .metrics import NLL, POLICY_GRADIENT, normalize_metrics
from .registry import open_step, refuse_while_open
from .step import StepResult, TrainStep

__all__ = [
    "NLL",
    "POLICY_GRADIENT",
    "StepResult",
    "TrainStep",
    "normalize_metrics",
    "open_step",
    "refuse_while_open",
]
