"""The microbatch calls of one optimizer step: their data, and their queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import MisuseError
from ._calls import SequentialCalls, Timer, failure_of, perform, run_to_end
from ._config import StreamingConfig
from ._parts import Trainer
from ._tags import Group


class Preparation:
    """Refreshes log-probs, which takes a call's groups together, and computes advantages, group by group.

    Advantages are computed once for a group: those of a failed step are kept for the next one.
    """

    def __init__(
        self,
        config: StreamingConfig,
        trainer: Trainer,
        compute_advantages: Callable[[Any], Any] | None,
        calls: SequentialCalls,
        timer: Timer,
    ) -> None:
        self._config, self._trainer, self._compute_advantages = config, trainer, compute_advantages
        self._calls, self._timer = calls, timer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megapatch-advantages")
        self.computed: dict[Group, Any] = {}  # of groups that were not trained on yet

    async def prepare(self, groups: Sequence[Group], claimed: Sequence[Any]) -> Any:
        """Return the data for train_microbatch(): a group's, or a list of them if a call takes several."""
        # By a step that failed: once is enough, it may change data in place.
        is_computed = [group in self.computed for group in groups]
        data = [self.computed.get(group, its) for group, its in zip(groups, claimed, strict=True)]
        if self._config.refreshes_logprobs:
            data = await self._with_logprobs(data)
        if self._compute_advantages is not None:
            with self._timer.phase("compute_advantages"):
                for place, group in enumerate(groups):
                    if not is_computed[place]:
                        computing = self._computed_advantages(self._compute_advantages, group, data[place])
                        data[place] = await run_to_end(computing)
        return self._together(data)

    def trained(self, groups: Sequence[Group], oldest: int) -> None:
        """Forget groups that were trained on, and those from weights before the version `oldest`."""
        self.computed = {
            group: data
            for group, data in self.computed.items()
            if group not in groups and (group.weight_version or 0) >= oldest
        }

    def _together(self, data: list[Any]) -> Any:
        return data[0] if self._config.prompt_groups_per_microbatch == 1 else data

    async def _with_logprobs(self, data: list[Any]) -> list[Any]:
        call = self._calls(
            self._trainer,
            "prepare_logprobs",
            self._together(data),
            refresh_policy_logprobs=self._config.refresh_policy_logprobs,
            refresh_reference_logprobs=self._config.refresh_reference_logprobs,
            data=True,
        )
        refreshed = await run_to_end(call)
        if self._config.prompt_groups_per_microbatch == 1:
            return [refreshed]
        if not isinstance(refreshed, Sequence) or len(refreshed) != len(data):
            found = f"{len(refreshed)} items" if isinstance(refreshed, Sequence) else type(refreshed).__name__
            raise MisuseError(
                f"prepare_logprobs() returned {found} for {len(data)} prompt groups; expected a list with the "
                "data of each, as prompt_groups_per_microbatch is above 1"
            )
        return list(refreshed)

    async def _computed_advantages(self, compute: Callable[[Any], Any], group: Group, data: Any) -> Any:
        """Compute and keep them here, where a cancellation of the step does not lose them."""
        self.computed[group] = computed = await perform(
            compute, data, thread=self._thread, watchdog=self._calls.watchdog, data=True
        )
        return computed


class MicrobatchQueue:
    """The train_microbatch calls of one step, of which at most `limit` are running or queued at a time."""

    def __init__(self, calls: SequentialCalls, trainer: Trainer, limit: int) -> None:
        self._calls, self._trainer, self._limit = calls, trainer, limit
        self._stopped = False
        self.tasks: deque[asyncio.Task[None]] = deque()

    def put(self, data: Any) -> None:
        """Queue a call."""
        self.tasks.append(asyncio.ensure_future(self._train(data)))

    def reap(self) -> None:
        """Forget finished calls; raise the exception of the first that failed."""
        while self.tasks and self.tasks[0].done():
            self.tasks.popleft().result()

    async def wait_for_room(self) -> None:
        """Wait until fewer than `limit` calls are left, and raise the exception of one that failed."""
        await self._wait_for_fewer_than(self._limit)

    async def wait_until_empty(self) -> None:
        """Wait until all calls have ended, and raise the exception of one that failed."""
        await self._wait_for_fewer_than(1)

    @property
    def failure(self) -> BaseException | None:
        """The failure of a call that was not raised."""
        failures = [failure_of(task) for task in self.tasks if task.done()]
        return next((failure for failure in failures if failure is not None), None)

    async def stop(self) -> list[BaseException]:
        """Make no more calls, wait for the running one, and return failures that were not raised."""
        self._stopped = True
        if self.tasks:
            await asyncio.wait(self.tasks)
        return [failure for task in self.tasks if (failure := failure_of(task)) is not None]

    async def _wait_for_fewer_than(self, number: int) -> None:
        self.reap()
        while len(self.tasks) >= number:
            await asyncio.wait([self.tasks[0]])  # which leaves it alone when we are cancelled
            self.reap()

    async def _train(self, data: Any) -> None:
        try:
            await self._calls(self._trainer, "train_microbatch", data, unless=lambda: self._stopped)
        except BaseException:
            self._stopped = True  # now, before the next one gets its turn
            raise
