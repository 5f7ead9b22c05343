"""Patches for ms-swift (Megatron-SWIFT), in the order in which they are listed."""

from __future__ import annotations

from ...patch import Patch
from . import overflow_is_skipped, train_reentry

PATCHES: tuple[Patch, ...] = (overflow_is_skipped.PATCH, train_reentry.PATCH)
