"""Patches for ROLL, in the order in which they are listed."""

from __future__ import annotations

from ...patch import Patch
from . import grad_scale, overflow_is_skipped

PATCHES: tuple[Patch, ...] = (grad_scale.PATCH, overflow_is_skipped.PATCH)
