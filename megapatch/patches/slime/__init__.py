"""Patches for slime and for miles, which shares its code, in the order in which they are listed."""

from __future__ import annotations

from ...patch import Patch
from . import first_sync_pushes_actor, train_reentry

PATCHES: tuple[Patch, ...] = (train_reentry.PATCH, first_sync_pushes_actor.PATCH)
