"""The one ordered list of all patches."""

from __future__ import annotations

from .patch import Patch
from .patches import megatron

PATCHES: tuple[Patch, ...] = (*megatron.PATCHES,)
