"""What the pump asks of weight syncs and of generation."""

from __future__ import annotations

from typing import Protocol

from ._buffer import MaybeAwaitable


class Synchronizer(Protocol):
    """Pushes the trainer's weights to generation.

    The method may be plain (it runs in the trainer's thread), a coroutine function, or a method of a Ray actor's
    handle.
    """

    def sync_weights(self) -> MaybeAwaitable[object]:
        """Push the current weights. The version is not an argument: see `Generation`."""


class Generation(Protocol):
    """Inference engines that can be paused during a weight sync.

    Methods may be plain (they run in the event loop, so they have to be quick), coroutine functions, or methods
    of a Ray actor's handle. `megapatch.weight_sync.paused_generation` says what happens when one fails or is
    missing.

    The pump also calls ``set_weight_version(version)`` after each sync, if there is such a method (a plain one
    runs in the trainer's thread). Rollouts sampled from then on have to bear this version.
    """

    def pause_generation(self) -> MaybeAwaitable[object]:
        """Stop serving, or abort, requests in flight."""

    def resume_generation(self) -> MaybeAwaitable[object]:
        """Serve requests again."""


class PausedBySync:
    """Generation whose own weight sync pauses and resumes it, so that a pump has only to tell it the version.

    Attributes:
        version: of the weights that engines have.
    """

    version = 0

    def set_weight_version(self, version: int) -> None:
        """Note the version of the synced weights."""
        self.version = version

    async def pause_generation(self) -> None:
        """Do nothing: the sync pauses."""

    async def resume_generation(self) -> None:
        """Do nothing: the sync resumes."""
