"""Patches for AReaL, in the order in which they are listed."""

from __future__ import annotations

from ...patch import Patch
from . import aux_loss_scale, gathered_when_read, pipeline_seed, weight_sync_resume

PATCHES: tuple[Patch, ...] = (
    aux_loss_scale.PATCH,
    gathered_when_read.PATCH,
    pipeline_seed.PATCH,
    weight_sync_resume.PATCH,
)
