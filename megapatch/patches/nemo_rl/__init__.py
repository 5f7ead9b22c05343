"""Patches for NeMo-RL, in the order in which they are listed."""

from __future__ import annotations

from ...patch import Patch
from . import (
    abort_resets_rerun,
    forward_pre_hook_after_split,
    gathered_when_read,
    hooks_without_overlap,
    open_step_guard,
    reference_model_rollback,
    split_train_step,
    split_train_step_dtensor,
    split_train_step_policy,
    sync_weights_version,
    train_after_exception,
)

PATCHES: tuple[Patch, ...] = (
    abort_resets_rerun.PATCH,
    forward_pre_hook_after_split.PATCH,
    gathered_when_read.PATCH,
    hooks_without_overlap.PATCH,
    open_step_guard.PATCH,
    reference_model_rollback.PATCH,
    split_train_step.PATCH,
    split_train_step_dtensor.PATCH,
    split_train_step_policy.PATCH,
    sync_weights_version.PATCH,
    train_after_exception.PATCH,
)
