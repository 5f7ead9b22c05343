"""One optimizer step: its data, the order of its calls, and how it is undone when a call fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .._pausing.waiting import tell_besides
from ..errors import EmptyStepError, MisuseError
from ._calls import MicrobatchQueue, SequentialCalls, Timer, perform, run_to_end
from ._config import StreamingConfig
from ._groups import Group, Groups
from ._parts import Buffer, Trainer
from ._rollouts import Rollouts
from ._supply import Supply


@dataclass(frozen=True)
class StepTaken:
    """The result of finish_train_step(), the groups trained on, and how many were too old meanwhile."""

    result: Any
    groups: list[Group]
    evicted: int

    def metrics(self, version: int) -> dict[str, float]:
        """Return counts and lags of this step, which gave the weights a version."""
        lags = [version - 1 - (group.weight_version or 0) for group in self.groups]
        return {
            "prompt_groups": len(self.groups),
            "samples": sum(len(group.keys) for group in self.groups),
            "evicted_prompt_groups": self.evicted,
            "max_lag": max(lags),
            "mean_lag": sum(lags) / len(lags),
        }


class OptimizerSteps:
    """Takes optimizer steps and counts them; the count is the version."""

    def __init__(
        self,
        config: StreamingConfig,
        trainer: Trainer,
        buffer: Buffer,
        compute_advantages: Callable[[Any], Any] | None,
        calls: SequentialCalls,
        timer: Timer,
        rollouts: Rollouts,
        version: int,
    ) -> None:
        self.version = version
        self.is_open = False
        self._config, self._trainer, self._calls, self._timer = config, trainer, calls, timer
        self._rollouts = rollouts
        self.supply = Supply(buffer, config, rollouts, version, calls.watchdog)
        self._preparation = Preparation(config, trainer, compute_advantages, calls, timer)
        self._claimed: list[Group] = []  # for the step that is open or has failed
        self._trained: list[Group] = []  # but not cleared yet

    async def take(self) -> StepTaken:
        """Take one step. It begins when the groups of its first microbatch call are there."""
        queue = MicrobatchQueue(self._calls, self._trainer)
        evicted = self.supply.evicted
        try:
            for size in self._config.prompt_groups_by_microbatch:
                with self._timer.phase("wait_for_trainer"):
                    await queue.wait_for_room()
                data = await self._next_microbatch(size, queue, evicted)
                if not self.is_open:
                    self.is_open = True  # before the call: one that fails may have begun a step
                    await run_to_end(self._calls(self._trainer, "begin_train_step"))
                queue.put(data)
            with self._timer.phase("wait_for_trainer"):
                await queue.wait_until_empty()
            groups = list(self._claimed)
            result = await run_to_end(self._finish())
        except BaseException as error:
            first = queue.failure if isinstance(error, Exception) else None  # a cancellation is raised in any case
            if first is None or first is error:
                await run_to_end(self._undo(queue, error))
                raise
            tell_besides("the pump failed, too", error, first, "pump-failed")
            await run_to_end(self._undo(queue, first))
            raise first from first.__cause__  # and not in the context of later ones
        return StepTaken(result, groups, self.supply.evicted - evicted)

    @property
    def computed(self) -> dict[Group, Any]:
        """Data of groups whose advantages were computed, and that were not trained on yet."""
        return self._preparation.computed

    async def restore(self, version: int, computed: dict[Group, Any]) -> tuple[list[Group], Groups]:
        """Begin at a version; return the incomplete groups, which are cleared, and the others."""
        self.version, self._preparation.computed = version, computed
        return await self.supply.restore(version)

    async def recover(self) -> None:
        """Undo or finish a step that has failed, as far as that has failed, too."""
        await self._abort()
        await self._give_back()
        await self._clear()

    async def _next_microbatch(self, size: int, queue: MicrobatchQueue, evicted_before: int) -> Any:
        """Claim `size` prompt groups, and return the data to train on."""
        groups, data = [], []
        for missing in range(size, 0, -1):
            # None is picked before all can be trained on: a better one may be there by then.
            with self._timer.phase("wait_for_rollouts"):
                groups.append(await self._next_group(missing, queue, evicted_before))
            data.append(await self._claim(groups[-1]))
        return await self._preparation.prepare(groups, data)

    async def _next_group(self, needed: int, queue: MicrobatchQueue, evicted_before: int) -> Group:
        places = self._config.prompt_groups_per_optimizer_step - len(self._claimed)
        found = await self.supply.next_group(self.version, needed, places, queue)
        if found is None:
            raise EmptyStepError(
                trained=len(self._claimed),
                target=self._config.prompt_groups_per_optimizer_step,
                evicted=self.supply.evicted - evicted_before,
                waiting=self.supply.waiting(),
            )
        return found

    async def _claim(self, group: Group) -> Any:
        self._claimed.append(group)  # before the call: one that fails may have claimed it
        with self._timer.phase("claim"):
            try:
                return await self.supply.claim(group)
            except MisuseError:  # it belongs to somebody else, so it is not ours to give back
                self._claimed.remove(group)
                raise

    async def _finish(self) -> Any:
        result = await self._calls(self._trainer, "finish_train_step")
        # The optimizer has stepped. These groups are not trained on again, even if a call fails from here on.
        self.is_open = False
        self.version += 1
        self._trained, self._claimed = self._claimed, []
        self._rollouts.trained(self._trained)
        self._preparation.trained(self._trained, self.version - self._config.max_staleness)
        with self._timer.phase("clear"):
            await self._clear()
        return result

    async def _undo(self, queue: MicrobatchQueue, error: BaseException) -> None:
        for failure in await queue.stop():
            if failure is not error:
                tell_besides("train_microbatch() failed", failure, error, "microbatch")
        await self._attempt(self._abort, error)
        await self._attempt(self._give_back, error)

    async def _attempt(self, undo: Callable[[], Awaitable[None]], error: BaseException) -> None:
        try:
            await undo()
        except (Exception, asyncio.CancelledError) as failure:  # an asyncio trainer may cancel itself
            tell_besides(
                f"{undo.__name__.strip('_')} failed, too; the next step repeats it", failure, error, "step-abort"
            )

    async def _abort(self) -> None:
        if self.is_open:
            await self._calls(self._trainer, "abort_train_step")
            self.is_open = False

    async def _give_back(self) -> None:
        if self._claimed:
            await self.supply.give_back(self._claimed)
            self._claimed = []

    async def _clear(self) -> None:
        if self._trained:
            await self.supply.clear(self._trained)
            self._trained = []


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
