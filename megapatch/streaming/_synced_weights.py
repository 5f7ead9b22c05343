"""Sync generation's weights, stamp them with their version, and keep rollouts out in the meantime."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from .._pausing.generation import RESUME, is_paused
from .._pausing.waiting import finished, wait_to_end
from .._troubleshooting import see
from ..weight_sync import paused_generation
from ._calls import SequentialCalls, failure_of, perform, raise_cancelled, run_to_end
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
        self._warned = self._left_paused = False

    async def permitted(self) -> None:
        """Rollout loop: wait until the gate is open."""
        while not self.admitted.is_set():  # another sync may have begun before it was our turn
            await self.admitted.wait()

    async def sync(self, version: int) -> None:
        """Pump: sync weights, and raise any exception of the pause, the sync or the resume.

        A cancellation during the sync itself is raised when everything is done and the gate is open.
        """
        self.admitted.clear()
        by_us = self._left_paused or not is_paused(self._generation)
        try:
            cancelled = await self._sync_while_paused(version)
        finally:
            self._left_paused = by_us and is_paused(self._generation)
        if self._left_paused:  # by an earlier sync, whose resume failed
            try:
                await run_to_end(self._resume())
            except Exception as failure:
                if cancelled is not None:
                    raise cancelled from failure
                raise
            finally:
                self._left_paused = is_paused(self._generation)
        self.admitted.set()
        if cancelled is not None:
            raise cancelled

    async def _sync_while_paused(self, version: int) -> BaseException | None:
        cancelled: BaseException | None = None
        try:
            async with self._paused():
                task = asyncio.ensure_future(self._sync_and_stamp(version))
                cancelled = await wait_to_end(task)
                if cancelled is not None and failure_of(task) is not None:
                    raise_cancelled(cancelled, task)
                task.result()
        except BaseException as failure:
            if cancelled is not None and failure is not cancelled:  # the resume has failed
                raise cancelled from failure
            raise
        return cancelled

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause generation; the watchdog looks at the pause and the resume."""
        pause, name = paused_generation(self._generation), type(self._generation).__name__
        with self._calls.watchdog.watching(f"the pause of {name}"):
            await pause.__aenter__()
        try:
            yield
        except BaseException as error:
            with self._calls.watchdog.watching(f"the resume of {name}"):
                await pause.__aexit__(type(error), error, error.__traceback__)
            raise
        else:
            with self._calls.watchdog.watching(f"the resume of {name}"):
                await pause.__aexit__(None, None, None)

    async def _resume(self) -> None:
        call = perform(getattr(self._generation, RESUME), watchdog=self._calls.watchdog)
        await finished(await call, f"{RESUME}()")

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
