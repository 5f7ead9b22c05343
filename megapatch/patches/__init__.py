"""The ordered list of all patches: a package for each family, a file for each patch.

A module whose name begins with an underscore is shared by patches.
"""

from __future__ import annotations

from ..patch import Patch
from . import megatron, nemo_rl, skyrl, slime

PATCHES: tuple[Patch, ...] = (*megatron.PATCHES, *nemo_rl.PATCHES, *skyrl.PATCHES, *slime.PATCHES)
