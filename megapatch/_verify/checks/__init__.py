"""All checks, in the order in which they run: silent defects first. One module a group of defects."""

from __future__ import annotations

from ..check import Check
from . import checkpoints, gradients, loads, process, train_step, training

CHECKS: tuple[Check, ...] = (
    *gradients.CHECKS,
    *checkpoints.CHECKS,
    *loads.CHECKS,
    *process.CHECKS,
    *training.CHECKS,
    *train_step.CHECKS,
)
