"""Patches for SkyRL, old package and new, in the order in which they are listed."""

from __future__ import annotations

from ...patch import Patch
from . import (
    accumulate_forward_backward,
    async_trainer_resume,
    gathered_when_read,
    grad_scale,
    pause_rollback,
    pipeline_seed,
    weight_sync_pause,
)

PATCHES: tuple[Patch, ...] = (
    accumulate_forward_backward.PATCH,
    async_trainer_resume.PATCH,
    gathered_when_read.PATCH,
    grad_scale.PATCH,
    pause_rollback.PATCH,
    pipeline_seed.PATCH,
    weight_sync_pause.PATCH,
)
