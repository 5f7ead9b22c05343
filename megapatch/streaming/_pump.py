"""Take steps one after the other, and sync weights after each."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from ..errors import MisuseError
from ._buffer import Buffer
from ._calls import SequentialCalls, wait_out
from ._config import StreamingConfig
from ._generation import Generation, Synchronizer
from ._optimizer_step import OptimizerSteps, StepTaken
from ._reporter import Logger, Reporter, ScalarWriter
from ._synced_weights import SyncedWeights
from ._timer import Timer
from ._trainer import Trainer


class TrainPump:
    """Trains on prompt groups as they become ready, in optimizer steps, and syncs weights after each step.

        pump = TrainPump(config, trainer, buffer, synchronizer, generation)
        await pump.run(num_steps=100)

    A step is `target_prompt_groups_per_step` prompt groups in one or several optimizer steps. For each optimizer
    step, the pump clears groups that are too old, claims and prepares the eligible group with the least lag, opens
    the trainer's step with the first group, and queues one microbatch call per group. After the last group it
    calls finish_train_step(), increments the version, and clears the groups in one call. It syncs weights after
    the last optimizer step.

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
            A plain function runs in a thread.
        logger: gets metrics under the prefixes "train" (the result of finish_train_step()), "streaming" and
            "timing/train" (seconds), with the version as the step. A plain one runs in the event loop.
        terminal: a stream such as sys.stderr, which shows a progress line if it is a terminal.
        version: of the trainer's weights now, in optimizer steps. If generation has other weights, as after
            loading a checkpoint, call sync_weights() first.

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
        logger: Logger | ScalarWriter | None = None,
        terminal: TextIO | None = None,
        version: int = 0,
    ) -> None:
        refreshing = ("prepare_logprobs",) if config.refreshes_logprobs else ()
        _require("trainer", trainer, *_methods_of(Trainer), *refreshing)
        _require("buffer", buffer, *_methods_of(Buffer))
        _require("synchronizer", synchronizer, *_methods_of(Synchronizer))
        version = _whole(version)
        self._config = config
        self._timer = Timer()
        calls = SequentialCalls(self._timer)
        self._steps = OptimizerSteps(config, trainer, buffer, compute_advantages, calls, self._timer, version)
        self._weights = SyncedWeights(synchronizer, generation, calls)
        self._reporter = Reporter(logger, terminal)
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
        """Wait until `admitted` is true. Call it before each rollout."""
        while not self.admitted:  # another sync may have begun before it was our turn
            await self._weights.admitted.wait()

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
            EmptyStepError: the buffer was closed, or no group came for `rollout_timeout` seconds, before an
                optimizer step had all of its groups.
            MisuseError: another call of this pump is running.
            Exception: whatever trainer, buffer, synchronizer or generation raises.
        """
        with self._using("step()"):
            self._timer.take()  # drop the seconds of a failed step
            await wait_out(self._steps.recover())
            while (taken := self.version - self._version_of_step) < self._config.optimizer_steps_per_step:
                with self._timer.phase("optimizer_step"):
                    done = await self._steps.take(1 if taken else self._config.min_prompt_groups_per_batch)
                await self._report(done)
            await self._sync()

    async def sync_weights(self) -> None:
        """Pause generation, sync weights, pass their version to generation, resume it, and admit rollouts.

        The next step() is a whole step, even if a failed one had optimizer steps left. After a failure, rollouts
        are not admitted until a sync has succeeded.

        Raises:
            MisuseError: another call of this pump is running, or a train step is open.
            Exception: whatever synchronizer or generation raises.
        """
        with self._using("sync_weights()"):
            self._timer.take()
            await self._sync()

    async def _sync(self) -> None:
        if self._steps.is_open:
            raise MisuseError(
                "sync_weights(): a train step is open because its abort failed; step() aborts it again"
            )
        await self._weights.sync(self.version)
        self._version_of_step = self.version
        await self._reporter.log_metrics(self._timer.take(), self.version, "timing/train")

    async def _report(self, done: StepTaken) -> None:
        version, seconds = self.version, self._timer.take()
        lags = [version - 1 - (group.weight_version or 0) for group in done.groups]
        streaming = {
            "prompt_groups": len(done.groups),
            "samples": sum(len(group.keys) for group in done.groups),
            "evicted_prompt_groups": done.evicted,
            "max_lag": max(lags),
            "mean_lag": sum(lags) / len(lags),
        }
        for metrics, prefix in (
            (done.result, "train"),
            (streaming, "streaming"),
            (seconds, "timing/train"),
        ):
            await self._reporter.log_metrics(metrics, version, prefix)
        self._reporter.progress(
            f"version {version}: {len(done.groups)} prompt groups, at most {max(lags)} versions behind, in "
            f"{seconds['optimizer_step']:.1f} s ({seconds['wait_for_rollouts']:.1f} s waiting for rollouts)"
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


def _methods_of(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]


def _require(role: str, given: Any, *names: str) -> None:
    if missing := [f"{name}()" for name in names if not hasattr(given, name)]:
        raise MisuseError(f"the {role}, a {type(given).__name__}, has no {', '.join(missing)}")


def _whole(version: Any) -> int:
    try:
        whole = int(operator.index(version))
    except TypeError:
        whole = -1
    if whole < 0:
        raise MisuseError(f"version is {version!r}; it has to be a whole number, 0 or more")
    return whole
