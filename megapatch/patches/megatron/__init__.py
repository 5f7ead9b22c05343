"""Patches for Megatron-LM itself."""

from __future__ import annotations

from ...patch import Patch
from .._catalogue import patches_of

PATCHES: tuple[Patch, ...] = patches_of(__name__)
