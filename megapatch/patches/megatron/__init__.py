"""Patches for Megatron-LM itself, in the order in which they are listed."""

from __future__ import annotations

from ...patch import Patch
from . import forward_pre_hook, train_reentry

PATCHES: tuple[Patch, ...] = (forward_pre_hook.PATCH, train_reentry.PATCH)
