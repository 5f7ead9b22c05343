"""Take steps one after the other, and sync weights after each."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from .._version import see
from ..errors import MisuseError
from ._calls import SequentialCalls, Timer, Watchdog, perform, run_to_end
from ._config import StreamingConfig
from ._optimizer_step import OptimizerSteps, StepTaken
from ._parts import Buffer, Generation, Logger, Synchronizer, Trainer, methods_of, require, whole_version
from ._resume import FORMAT, as_plain, load
from ._rollouts import Rollouts
from ._synced_weights import SyncedWeights

log = logging.getLogger("megapatch")


class TrainPump:
    """Trains on prompt groups as they become ready, in optimizer steps, and syncs weights after each step.

        pump = TrainPump(config, trainer, buffer, synchronizer, generation)
        await pump.run(num_steps=100)

    A step is `target_prompt_groups_per_step` prompt groups in one or several optimizer steps. For each optimizer
    step, the pump clears groups that are too old, and claims and prepares the eligible ones, in the order of
    `pick`. The first group opens the trainer's step. The pump queues a microbatch call for each group, or for each
    `prompt_groups_per_microbatch` of them once that many are eligible. After the last group it calls
    finish_train_step(), increments the version, and clears the groups in one call. It syncs weights after the last
    optimizer step.

    When a call fails or the pump is cancelled, it waits for running calls, aborts the open step, gives back the
    groups that the step claimed (their gradients are dropped), leaves the version unchanged, and raises. If the
    abort or the give-back fails as well, that is logged, and the next step() repeats it before anything else. A
    failure of finish_train_step() counts as one before the optimizer stepped.

    If clearing fails, the optimizer has stepped: the version is up, and the groups stay claimed, because they must
    not be trained on twice. The next step() clears them and continues with the optimizer steps that are left
    before the sync, or with the sync.

    Use a pump in one event loop.

    Args:
        config: settings.
        trainer: plain, asyncio, or a Ray actor's handle.
        buffer: for example a `RolloutBuffer`, which no other pump uses.
        synchronizer: pushes weights to generation; plain (it runs in the trainer's thread), asyncio or Ray.
        generation: paused during a sync, as by `megapatch.weight_sync.paused_generation`, and given the version of
            the synced weights if it has ``set_weight_version(version)``.
        compute_advantages: gets a group's data, after log-probs were refreshed, and returns the data to train on.
            A plain function runs in a thread. It is called once for a group, also if a step fails and the group is
            trained on by a later one, so it may change the data in place; with refreshed log-probs,
            ``prepare_logprobs()`` gets its result then.
        logger: gets metrics under the prefixes "train" (the result of finish_train_step()), "streaming" and
            "timing/train" (seconds), with the version as the step. A plain one runs in the event loop. Its first
            failure is logged; none stops training.
        version: of the trainer's weights now, in optimizer steps. If generation has other weights, as after
            loading a checkpoint without `load_state_dict`, call sync_weights() first.

    Raises:
        MisuseError: a part lacks a method, or `version` is not a whole number from 0 on. Methods raise it (a
            RuntimeError) when they are called at a wrong moment.
    """

    def __init__(
        self,
        config: StreamingConfig,
        trainer: Trainer,
        buffer: Buffer,
        synchronizer: Synchronizer,
        generation: Generation,
        *,
        compute_advantages: Callable[[Any], Any] | None = None,
        logger: Logger | None = None,
        version: int = 0,
    ) -> None:
        refreshing = ("prepare_logprobs",) if config.refreshes_logprobs else ()
        require("trainer", trainer, *methods_of(Trainer), *refreshing)
        require("buffer", buffer, *methods_of(Buffer))
        require("synchronizer", synchronizer, *methods_of(Synchronizer))
        version = whole_version(version)
        self._config, self._buffer = config, buffer
        self._timer = Timer()
        self._watchdog = Watchdog()
        calls = SequentialCalls(self._timer, self._watchdog)
        self._weights = SyncedWeights(synchronizer, generation, calls)
        self._rollouts = Rollouts(config, self._weights, version)
        self._steps = OptimizerSteps(
            config, trainer, buffer, compute_advantages, calls, self._timer, self._rollouts, version
        )
        self._watchdog.others_waiting = self._steps.supply.waiting
        self._logger, self._warned = logger, False
        self._first_version = version
        self._version_of_step = version  # with which this step began: that of the last sync
        self._in_use: str | None = None

    @property
    def version(self) -> int:
        """Version of the trainer's weights: optimizer steps so far."""
        return self._steps.version

    @property
    def admitted(self) -> bool:
        """Whether a rollout may begin: not during a weight sync, nor after a failed one."""
        return self._weights.admitted.is_set()

    async def rollouts_permitted(self) -> None:
        """Rollout loop: wait until `admitted` is true.

        Nothing bounds the rollouts that begin after this; those that are too old when they end are evicted, mostly
        long ones. `rollout` bounds them.
        """
        await self._weights.permitted()

    def rollout(self, group_id: Hashable) -> AbstractAsyncContextManager[None]:
        """Rollout loop: return an asynchronous context to roll a prompt group out and put it into the buffer.

            async with pump.rollout(group_id):
                ...

        It begins when weights are not being synced, and the group can still be trained on: there are never more
        groups that have begun and are not trained on yet than ``max_staleness + 1`` optimizer steps take. A group
        that leaves no samples in the buffer is replaced by another, and so is one that leaves its context with an
        exception: the pump drops its samples, unless all are there, before it looks for the next group. Then that
        group may begin again.

        Args:
            group_id: as in the samples' tags.

        Raises:
            MisuseError: as the context begins: this group has begun already, and was not trained on yet.
        """
        return self._rollouts.rollout(group_id)

    async def run(self, num_steps: int) -> None:
        """Call `step` `num_steps` times.

        Args:
            num_steps: steps, each of one or several optimizer steps.

        Raises:
            EmptyStepError: as `step` does; it raises other exceptions of `step`, too.
        """
        for _ in range(num_steps):
            await self.step()

    async def step(self) -> None:
        """Train on the prompt groups of one step, and sync weights. After a failure, resume where it happened.

        Raises:
            EmptyStepError: the buffer was closed before an optimizer step had all of its groups.
            MisuseError: another call of this pump is running.
            Exception: any exception of trainer, buffer, synchronizer or generation.
        """
        with self._using("step()"):
            self._timer.take()  # drop the seconds of a failed step
            await run_to_end(self._steps.recover())
            if not self.admitted and self._has_optimizer_steps_left:
                await self._sync()  # one by hand has failed: no rollout would begin, and none come
            while self._has_optimizer_steps_left:
                with self._timer.phase("optimizer_step"):
                    done = await self._steps.take()
                await self._report(done)
            await self._sync()

    async def sync_weights(self) -> None:
        """Pause generation, sync weights, pass their version to generation, resume it, and admit rollouts.

        The next step() is a whole step, even if a failed one had optimizer steps left. After a failure, rollouts
        are not admitted until a sync has succeeded; the next step() begins with one.

        Raises:
            MisuseError: another call of this pump is running, or a train step is open.
            Exception: any exception of synchronizer or generation.
        """
        with self._using("sync_weights()"):
            self._timer.take()
            await self._sync()

    async def state_dict(self) -> dict[str, Any]:
        """Return the state from which a new pump continues; call it between two steps.

        Save it together with the trainer's weights and the position in the prompts, in one file or folder that is
        renamed when it is whole. It holds the version, the rollouts that have begun, and the buffer's samples if
        the buffer has ``state_dict()``, as `RolloutBuffer` has. All values are plain, except for the keys, tags
        and data that were put into the buffer. If a step has failed, it is undone first.

        Raises:
            MisuseError: another call of this pump is running.
            Exception: any exception of trainer or buffer when a failed step is undone.
        """
        with self._using("state_dict()"):
            await run_to_end(self._steps.recover())
            state = {"format": FORMAT, "version": self.version, "computed": as_plain(self._steps.computed)}
            if (save := getattr(self._buffer, "state_dict", None)) is not None:
                state["buffer"] = await perform(save, data=True)
            state["rollouts"] = self._rollouts.state()  # later than the buffer's: no group there is missing here
            return state

    async def load_state_dict(self, state: Mapping[str, Any]) -> list[Hashable]:
        """Continue where another pump was; the trainer has to have the weights of that checkpoint.

        Complete groups are trained on as if nothing had happened. Samples of groups that were not complete are
        dropped. No rollout begins before a weight sync: generation may have other weights. The next step() begins
        with one, and is a whole step.

        Args:
            state: a result of `state_dict`.

        Returns:
            The groups that were in flight, or waited to begin: roll them out again.

        Raises:
            MisuseError: this pump has trained or begun a rollout, its buffer has had samples or cannot load them,
                or the state is of another format.
        """
        with self._using("load_state_dict()"):
            if self._rollouts.has_begun or self.version != self._first_version:
                raise MisuseError("load_state_dict(): this pump has been in use already; load into a new one")
            version, again = await load(state, self._buffer, self._steps, self._rollouts)
            self._weights.admitted.clear()
            self._first_version = self._version_of_step = version
            return again

    @property
    def _has_optimizer_steps_left(self) -> bool:
        return self.version - self._version_of_step < self._config.optimizer_steps_per_step

    async def _sync(self) -> None:
        if self._steps.is_open:
            raise MisuseError(
                "sync_weights(): a train step is open because its abort failed; step() aborts it again"
            )
        try:
            await self._weights.sync(self.version)
        finally:
            if self.admitted:  # also where a cancellation is raised after a sync
                self._rollouts.synced()
        self._version_of_step = self.version
        await self._log(self._timer.take(), "timing/train")

    async def _report(self, done: StepTaken) -> None:
        seconds = self._timer.take()
        await self._log(done.result, "train")
        await self._log({**done.metrics(self.version), "rollouts_begun": self._rollouts.take_begun()}, "streaming")
        await self._log(seconds, "timing/train")

    async def _log(self, result: Any, prefix: str) -> None:
        """Pass on a mapping or a dataclass, and ignore anything else. A failure does not stop training."""
        if self._logger is None:
            return
        try:
            if dataclasses.is_dataclass(result) and not isinstance(result, type):
                result = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
            if isinstance(result, Mapping) and result:
                metrics = {str(name): value for name, value in result.items()}
                labels: dict[str, Any] = {"step": self.version, "prefix": prefix}
                await perform(self._logger.log_metrics, metrics, watchdog=self._watchdog, data=True, **labels)
        except Exception:
            if not self._warned:
                self._warned = True
                log.exception(
                    "a logger failed; training continues, and further failures are not logged" + see("logger")
                )

    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[None]:
        if self._in_use is not None:
            open_step = ": a train step is open" if self._steps.is_open else ""
            raise MisuseError(
                f"{what} while {self._in_use} of this pump is running{open_step}; wait until that ends"
            )
        self._in_use = what
        try:
            yield
        finally:
            self._in_use = None
