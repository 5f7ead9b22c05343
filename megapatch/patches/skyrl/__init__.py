"""Patches for SkyRL, old package and new."""

from __future__ import annotations

from ...patch import Patch
from .._catalogue import patches_of

PATCHES: tuple[Patch, ...] = patches_of(__name__)
