"""The one ordered list of all patches."""

from __future__ import annotations

from .patch import Patch
from .patches import megatron, nemo_rl, skyrl, slime

PATCHES: tuple[Patch, ...] = (*megatron.PATCHES, *nemo_rl.PATCHES, *skyrl.PATCHES, *slime.PATCHES)
