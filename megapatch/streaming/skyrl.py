"""SkyRL's workers as the parts of a `TrainPump`: its WorkerDispatch trains, and its weight syncs stay as they are.

trainer, weights = DispatchTrainer(dispatch), SamplerWeights(dispatch)
pump = TrainPump(config, trainer, buffer, weights, weights)
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .._python.layers import MARK
from ..errors import MisuseError
from ..patch import FIXED
from ..patches.skyrl import accumulate_forward_backward as several_calls
from ._parts import PausedBySync

__all__ = ["DispatchTrainer", "SamplerWeights"]


class DispatchTrainer:
    """A `Trainer` of SkyRL's WorkerDispatch, with Megatron's or FSDP's workers.

    A dispatch has neither a begin nor an abort. Before the first step, all workers are asked whether the calls of
    forward_backward() add up there: up to skyrl 0.3.0 it takes megapatch for that, which has to be installed where
    the workers run. An abort drops gradients in the workers.

    Args:
        dispatch: a WorkerDispatch whose model is neither colocated with inference engines nor with a reference
            model: a model on the same GPUs would offload the gradients of an open step.
        model: the dispatch's name of the model.
        **arguments: passed on to forward_backward(): loss_fn, loss_fn_config, return_per_token_outputs.

    Raises:
        MisuseError: the model is colocated.
    """

    def __init__(self, dispatch: Any, model: str = "policy", **arguments: Any) -> None:
        shared_with_reference = dispatch.colocate_policy_ref and "ref" in dispatch._actor_groups
        if dispatch.colocate_all or shared_with_reference:
            setting = "colocate_all" if dispatch.colocate_all else "colocate_policy_ref"
            raise MisuseError(
                f"the dispatch has trainer.placement.{setting}=true, and whatever shares the GPUs of the {model} "
                "would offload the gradients of an open step; expected false"
            )
        self.dispatch, self.model, self.arguments = dispatch, model, arguments
        self._checked = False
        self._metrics: dict[str, list[Any]] = {}

    def begin_train_step(self) -> None:
        """Forget the metrics of other steps.

        Raises:
            MisuseError: calls of forward_backward() do not add up in the workers.
        """
        if not self._checked:
            self._on_workers(_require_that_calls_add_up)
            self._checked = True
        self._metrics = {}

    def train_microbatch(self, data: Any) -> None:
        """Run forward and backward of one prompt group on all ranks.

        Args:
            data: a TrainingInputBatch whose samples can be divided among the data-parallel ranks.
        """
        output = self.dispatch.forward_backward(self.model, data, **self.arguments)
        metrics: Mapping[str, Any] = getattr(output, "metrics", output)  # a mapping itself up to skyrl 0.1.0
        for name, value in metrics.items():
            if name != "loss_fn_outputs":
                self._metrics.setdefault(name, []).append(value)

    def finish_train_step(self) -> dict[str, Any]:
        """Step the optimizer on all ranks.

        Returns:
            The metrics of all calls, reduced by SkyRL's own rules, and grad_norm.
        """
        grad_norm = self.dispatch.optim_step(self.model)
        metrics, self._metrics = self._reduced(), {}
        return metrics if grad_norm is None else {**metrics, "grad_norm": grad_norm}

    def abort_train_step(self) -> None:
        """Drop the gradients of all workers, once their running calls have ended."""
        self._on_workers(_drop_gradients)
        self._metrics = {}

    def _reduced(self) -> dict[str, Any]:
        package = type(self.dispatch).__module__.rpartition(".")[0]
        reduce_metrics = importlib.import_module(f"{package}.worker_utils").reduce_metrics
        takes_sums = "sum_loss_metrics" in inspect.signature(reduce_metrics).parameters
        return dict(reduce_metrics(self._metrics, **({"sum_loss_metrics": True} if takes_sums else {})))

    def _on_workers(self, function: Callable[[Any], None]) -> None:
        """Run a function of this module with each worker, in its process.

        ``__ray_call__`` is a method of every Ray actor (ray/actor.py, seen in 2.51.1 and 2.54.0).
        """
        import ray

        workers = self.dispatch._actor_groups[self.model].actor_infos
        ray.get([worker.handle.__ray_call__.remote(function) for worker in workers])


class SamplerWeights(PausedBySync):
    """Synchronizer and generation of a pump, around ``WorkerDispatch.save_weights_for_sampler()``.

    That pauses and resumes the engines, so the two methods of this name do nothing here. Up to the end of the sync
    it blocks the event loop, as in SkyRL's own trainer: rollouts would be paused in any case.

    Args:
        dispatch: a WorkerDispatch that has an inference engine client.

    Attributes:
        version: of the weights that engines have. Read it before a rollout, for the tags of its samples: the
            engines may end it with newer weights.
    """

    def __init__(self, dispatch: Any) -> None:
        self.dispatch = dispatch

    async def sync_weights(self) -> None:
        """Push the model's weights to the engines."""
        await self.dispatch.save_weights_for_sampler()


# ---------------------------------------------------------------------------- in the workers
def _require_that_calls_add_up(worker: Any) -> None:
    """Raise MisuseError if a worker of Megatron's would train on the last call only."""
    for module in several_calls.MODULES:
        kind = getattr(sys.modules.get(module), several_calls.WORKER, None)
        if kind is None or not isinstance(worker, kind):
            continue
        verdict = several_calls.PATCH.sites[0].diagnose(sys.modules[module])
        if MARK not in vars(kind.forward_backward) and verdict.kind is not FIXED:
            raise MisuseError(
                f"{verdict.reason}: each prompt group needs a call of its own. Apply "
                "skyrl.accumulate-forward-backward in the workers (`megapatch doctor` says why it is not)"
            )


def _drop_gradients(worker: Any) -> None:
    """Drop the sum of the worker's calls of forward_backward()."""
    chunks = getattr(worker, "actor_module", None)
    if chunks is None:  # FSDP
        worker.optimizer.zero_grad()
    else:
        several_calls.drop_step(worker)
    if hasattr(worker, "_micro_batches_accumulated"):  # by which FSDP's workers divide gradients, up to 0.3.0
        worker._micro_batches_accumulated = 0
