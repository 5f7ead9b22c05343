"""slime's training actors as the parts of a `TrainPump`.

trainer, weights = GroupTrainer(actor_model, batch_size=256), GroupWeights(actor_model)
pump = TrainPump(config, trainer, buffer, weights, weights)
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._mcore.bucket_groups import finish_param_gathers
from .._python.dotted import temporarily_set
from ..errors import MisuseError
from ._parts import PausedBySync

if TYPE_CHECKING:
    from ..train_step import TrainStep

__all__ = ["GroupTrainer", "GroupWeights"]


class GroupTrainer:
    """A `Trainer` of slime's RayTrainGroup.

    All calls run in its actors, where megapatch has to be installed. A prompt group goes through slime's own
    ``train_actor()``: log-probs, advantages, and the forward and backward passes of ``train_one_step()``, whose
    optimizer step is left to `finish_train_step`.

    Args:
        group: a RayTrainGroup, of the actor.
        batch_size: samples of an optimizer step, over all ranks, by which slime divides losses.

    `begin_train_step` raises MisuseError where ``--offload-train`` is set.
    """

    def __init__(self, group: Any, batch_size: int) -> None:
        self.group, self.batch_size = group, batch_size

    def begin_train_step(self) -> None:
        """Begin an optimizer step on all ranks."""
        self._on_ranks("begin", self.batch_size)

    def train_microbatch(self, data: Any) -> None:
        """Run forward and backward of one prompt group on all ranks.

        Args:
            data: the result of slime's ``RolloutManager.generate()``: an item for each data-parallel rank.
        """
        self._on_ranks("train", data)

    def finish_train_step(self) -> dict[str, float]:
        """Step the optimizer on all ranks.

        Returns:
            The norm of the gradient, the learning rate, and the losses of the step as slime logs them.
        """
        found: list[dict[str, float]] = self._on_ranks("finish")
        return max(found, key=len)  # only the last pipeline stage has losses

    def abort_train_step(self) -> None:
        """Drop the gradients of the open step, if any, on all ranks."""
        self._on_ranks("abort")

    def _on_ranks(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the ranks' steps, in the processes of the actors, and wait for all of them.

        ``__ray_call__`` is a method of every Ray actor (ray/actor.py, seen in 2.51.1 and 2.54.0).
        """
        import ray

        handles = self.group._actor_handlers
        found: list[Any] = ray.get([handle.__ray_call__.remote(_call, method, *arguments) for handle in handles])
        return found


class GroupWeights(PausedBySync):
    """Synchronizer and generation of a pump, around ``RayTrainGroup.update_weights()``.

    That pauses and resumes the engines, so the two methods of this name do nothing here.

    Args:
        group: a RayTrainGroup, of the actor.

    Attributes:
        version: of the weights that engines have. Read it before a rollout, for the tags of its samples.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def sync_weights(self) -> Any:
        """Push the actor's weights to the engines; return a coroutine where the group's method is one."""
        return self.group.update_weights()


# ---------------------------------------------------------------------------- in the actors
_STEP = "_megapatch_step"
"""Attribute of an actor: its _RankStep, which refers to it; nobody pickles an actor."""


def _call(actor: Any, method: str, *arguments: Any) -> Any:
    step = vars(actor).get(_STEP) or _RankStep(actor)
    setattr(actor, _STEP, step)
    return getattr(step, method)(*arguments)


class _Stopped(Exception):
    """Leaves slime's train_one_step() when it has the gradients."""


class _RankStep:
    """An optimizer step of one actor, of prompt groups that go through slime's own functions one by one."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.actors = sys.modules[type(actor).train_actor.__module__]
        self.models = sys.modules[self.actors.train.__module__]
        self.step: TrainStep | None = None
        self.batch_size = self.calls = 0
        self.losses: list[Any] = []

    def begin(self, batch_size: int) -> None:
        from megatron.core.utils import get_model_config

        from ..train_step import TrainStep

        actor, self.batch_size, self.losses = self.actor, batch_size, []
        if actor.args.offload_train:
            raise MisuseError(
                "--offload-train would offload the gradients of an open step; training as rollouts arrive needs "
                "GPUs of its own"
            )
        for chunk in actor.model:
            chunk.train()
        config = get_model_config(actor.model[0])
        config.grad_scale_func, config.timers = actor.optimizer.scale_loss, None
        config.finalize_model_grads_func = self.models.finalize_model_grads
        by_tokens = actor.args.calculate_per_token_loss
        self.step = TrainStep(actor.model, actor.optimizer, actor.opt_param_scheduler, calls_add_up=not by_tokens)
        self.step.begin()

    def train(self, data: Any) -> None:
        with temporarily_set(self.actors, train=self._accumulate):
            self.actor.train_actor(self.calls, self.actor._get_rollout_data(data))
        self.calls += 1

    def finish(self) -> dict[str, float]:
        assert self.step is not None
        result = self.step.finish(increment=self.batch_size)
        for chunk in self.actor.model:
            finish_param_gathers(chunk)  # as slime's train() does at its end: later code reads the parameters
        self.actor.weights_backuper.backup("actor")
        found = {"grad_norm": float(result.grad_norm or 0.0), "lr": result.learning_rate}
        return {**found, **self._reduced()}

    def abort(self) -> None:
        if self.step is not None:
            self.step.abort()

    def _accumulate(
        self,
        rollout_id: int,
        model: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        data_iterator: Sequence[Any],
        num_microbatches: Sequence[int],
        *global_batch_sizes: Any,
    ) -> None:
        """Take the place of slime's train(): the same calls of train_one_step(), up to the gradients."""
        for iterator in data_iterator:
            iterator.reset()
        train_one_step = self.models.train_one_step
        known = inspect.signature(train_one_step).parameters
        of_main = {"step_global_batch_size": self.batch_size} if "step_global_batch_size" in known else {}
        for index, number in enumerate(num_microbatches):
            arguments = (self.actor.args, rollout_id, index, data_iterator, model, optimizer, scheduler, number)
            with self._up_to_gradients(number), contextlib.suppress(_Stopped):
                train_one_step(*arguments, **of_main)

    @contextlib.contextmanager
    def _up_to_gradients(self, num_microbatches: int) -> Iterator[None]:
        """Have train_one_step() zero nothing, and stop after its schedule, which runs as a call of our step."""
        schedules = self.models.get_forward_backward_func

        def accumulating() -> Callable[..., Any]:
            schedule = schedules()

            def accumulating_schedule(*args: Any, **kwargs: Any) -> Any:
                assert self.step is not None
                with self.step.accumulate(num_microbatches):
                    self.losses += schedule(*args, **kwargs)
                raise _Stopped

            return accumulating_schedule

        with contextlib.ExitStack() as stack:
            stack.enter_context(temporarily_set(self.models, get_forward_backward_func=accumulating))
            for owner in (*self.actor.model, self.actor.optimizer):
                name = "zero_grad" if owner is self.actor.optimizer else "zero_grad_buffer"
                stack.enter_context(temporarily_set(owner, **{name: lambda: None}))
            yield

    def _reduced(self) -> dict[str, float]:
        """Return the losses of all calls as slime reduces those of a step; nothing before its v0.3.0."""
        from megatron.core import parallel_state

        utils = getattr(self.models, "train_metric_utils", None)
        if not hasattr(utils, "reduce_train_step_metrics") or not parallel_state.is_pipeline_last_stage():
            return {}
        found = utils.reduce_train_step_metrics(  # type: ignore[union-attr]
            self.losses,
            calculate_per_token_loss=self.actor.args.calculate_per_token_loss,
            step_global_batch_size=self.batch_size,
            cp_size=parallel_state.get_context_parallel_world_size(),
            dp_with_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        return {name: float(value) for name, value in found.items()}
