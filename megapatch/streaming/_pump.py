"""Steps one after the other, and weights synced after each."""

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

    config         a StreamingConfig
    trainer        a Trainer: plain, asyncio, or a Ray actor's handle
    buffer         a Buffer, such as RolloutBuffer; of this pump alone
    synchronizer   has sync_weights(), without a version: plain (it runs in the trainer's thread), asyncio or Ray
    generation     what `megapatch.weight_sync.paused_generation` takes; its set_weight_version(version), where it
                   has that, is told the version of the weights that were synced (plain: in the trainer's thread)
    compute_advantages   is called with a group's data, after its log-probs were refreshed, and returns the data to
                         train on. A plain function runs in a thread.
    logger         has log_metrics(metrics, step=, prefix=), or is a TensorBoard SummaryWriter. The step is the
                   version; prefixes are "train" (what finish_train_step() returns), "streaming", "timing/train"
                   (seconds). A plain one runs in the event loop, as do plain methods that pause and resume.
    terminal       a stream such as sys.stderr; a progress line is kept there if it is a terminal
    version        of the trainer's weights now. Where generation has others, as after loading a checkpoint, call
                   sync_weights() first.

    A step is `target_prompt_groups_per_step` prompt groups in one or several optimizer steps. For each of these,
    groups that are too old are cleared; the eligible group of the least lag is claimed and prepared; the trainer's
    step begins with the first; a microbatch call is queued for each; after the last of these, finish_train_step()
    is called, the version goes up by one, and the groups are cleared in one call. Weights are synced after the
    last optimizer step.

    When anything fails or is cancelled, calls under way are waited for; the open step is aborted; the groups that
    it claimed are given back, as their gradients are dropped; the version is left alone; and it is raised. An
    abort or a give-back that fails as well is logged, and repeated by the next step() before anything else. Where
    it was the clearing that failed, the optimizer has stepped: the version is up, and the groups stay claimed, as
    they must not be trained on twice, until the next step() clears them. That goes on with the optimizer steps
    that are left to do before the sync, or with the sync. A failure of finish_train_step() counts as one before
    the optimizer stepped.

    For one event loop. Methods raise MisuseError (a RuntimeError) when called at a wrong moment.
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
        self._version_of_step = version  # that this step began with: the last sync's
        self._in_use: str | None = None

    @property
    def version(self) -> int:
        """Of the trainer's weights: optimizer steps until now."""
        return self._steps.version

    @property
    def admitted(self) -> bool:
        """Whether a rollout may begin: not while weights are synced, nor after a sync that failed."""
        return self._weights.admitted.is_set()

    async def rollouts_permitted(self) -> None:
        """Wait until `admitted`: for generation, before each rollout."""
        while not self.admitted:  # another sync may have begun before it was our turn
            await self._weights.admitted.wait()

    async def run(self, num_steps: int) -> None:
        """So many times `step`."""
        for _ in range(num_steps):
            await self.step()

    async def step(self) -> None:
        """Train on the prompt groups of one step, and sync weights. After a failure it goes on where that was.

        Raises EmptyStepError when the buffer is closed, or no group came for `rollout_timeout` seconds, before an
        optimizer step had all of its; and whatever trainer, buffer, synchronizer or generation raise.
        """
        with self._using("step()"):
            self._timer.take()  # of a step that failed
            await wait_out(self._steps.recover())
            while (taken := self.version - self._version_of_step) < self._config.optimizer_steps_per_step:
                with self._timer.phase("optimizer_step"):
                    done = await self._steps.take(1 if taken else self._config.min_prompt_groups_per_batch)
                await self._report(done)
            await self._sync()

    async def sync_weights(self) -> None:
        """Pause generation, sync weights, tell generation their version, resume it, and admit rollouts. The next
        step() is a whole one then, also where one that failed had optimizer steps left.

        Raises MisuseError while a step is open, and whatever synchronizer and generation raise; rollouts are not
        admitted then until a sync has succeeded.
        """
        with self._using("sync_weights()"):
            self._timer.take()
            await self._sync()

    async def _sync(self) -> None:
        if self._steps.is_open:
            raise MisuseError("sync_weights(): a train step is open, as its abort failed; step() aborts it again")
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
            f"version {version}: {len(done.groups)} prompt groups, at most {max(lags)} behind, in "
            f"{seconds['optimizer_step']:.1f} s, {seconds['wait_for_rollouts']:.1f} of them waiting for rollouts"
        )

    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[None]:
        if self._in_use is not None:
            open_step = ": a train step is open" if self._steps.is_open else ""
            raise MisuseError(
                f"{what} while {self._in_use} of this pump is under way{open_step}; wait for its end"
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
