"""The one ordered list of all patches."""

from __future__ import annotations

from .patch import Patch
from .patches import megatron, skyrl, slime

PATCHES: tuple[Patch, ...] = (*megatron.PATCHES, *skyrl.PATCHES, *slime.PATCHES)
