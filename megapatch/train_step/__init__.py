"""One optimizer step from any number of forward-backward calls: see `TrainStep`."""

from __future__ import annotations

from ._metrics import NLL, POLICY_GRADIENT, normalize_metrics
from ._open_steps import open_step, refuse_while_open
from ._result import Optimizer, Scheduler, StepResult
from ._step import TrainStep

__all__ = [
    "NLL",
    "POLICY_GRADIENT",
    "Optimizer",
    "Scheduler",
    "StepResult",
    "TrainStep",
    "normalize_metrics",
    "open_step",
    "refuse_while_open",
]
