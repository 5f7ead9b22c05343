"""Patches for verl, in the order in which they are listed."""

from __future__ import annotations

from ...patch import Patch
from . import gathered_when_read, overflow_is_skipped, pipeline_seed, training_hooks, weight_sync_resume

PATCHES: tuple[Patch, ...] = (
    gathered_when_read.PATCH,
    overflow_is_skipped.PATCH,
    pipeline_seed.PATCH,
    training_hooks.PATCH,
    weight_sync_resume.PATCH,
)
