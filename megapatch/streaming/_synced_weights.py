"""Sync generation's weights, stamp them with their version, and keep rollouts out in the meantime."""

from __future__ import annotations

import asyncio
import logging

from .._pausing.waiting import finished
from .._version import see
from ..weight_sync import paused_generation
from ._calls import SequentialCalls, run_to_end
from ._parts import Generation, Synchronizer

log = logging.getLogger("megapatch")

STAMP = "set_weight_version"


class SyncedWeights:
    """Syncs weights, and closes a gate for rollouts from the start of a sync until one has succeeded.

    Samples from mixed weights would bear a wrong version.
    """

    def __init__(self, synchronizer: Synchronizer, generation: Generation, calls: SequentialCalls) -> None:
        self._synchronizer, self._generation, self._calls = synchronizer, generation, calls
        self.admitted = asyncio.Event()
        self.admitted.set()
        self._warned = False

    async def permitted(self) -> None:
        """Rollout loop: wait until the gate is open."""
        while not self.admitted.is_set():  # another sync may have begun before it was our turn
            await self.admitted.wait()

    async def sync(self, version: int) -> None:
        """Pump: sync weights, and raise any exception of the pause, the sync or the resume.

        A cancellation is raised when everything is done and, unless that has failed, the gate is open.
        """
        self.admitted.clear()
        await run_to_end(self._sync_while_paused(version))

    async def _sync_while_paused(self, version: int) -> None:
        name = type(self._generation).__name__
        with self._calls.watchdog.watching(f"a weight sync, in which {name} is paused and resumed"):
            async with paused_generation(self._generation):
                await self._sync_and_stamp(version)
        self.admitted.set()

    async def _sync_and_stamp(self, version: int) -> None:
        await finished(await self._calls(self._synchronizer, "sync_weights"), "sync_weights()")
        if getattr(self._generation, STAMP, None) is None:
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s has no %s(): make sure that rollouts get the version of their weights in another way"
                    + see("no-stamp"),
                    type(self._generation).__name__,
                    STAMP,
                )
            return
        # A failure is raised: new rollouts would count as older than they are and be evicted, perhaps forever.
        await finished(await self._calls(self._generation, STAMP, version), f"{STAMP}()")
