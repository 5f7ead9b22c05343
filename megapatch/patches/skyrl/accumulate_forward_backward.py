"""Several forward_backward calls before one optim_step add up to the gradient of all of them.

Symptom   a batch that comes in several forward_backward requests (Tinker clients split large ones) silently trains
          on the last request only: each call zeroes the gradients of those before it, and reduces its own.
Upstream  fixed by NovaSky-AI/SkyRL#2008, in 0.4.0. The defect is in skyrl 0.1.0 to 0.3.0, and in checkouts from
          2026-01-30 on; skyrl-train up to 0.3.1 has no such calls.
Seam      the policy worker's methods. The calls up to an optim_step are one `TrainStep`: forward_backward begins
          it if none is open, runs without zeroing and within `accumulate`; optim_step reduces, once, before
          SkyRL's own. Each LoRA adapter has a step of its own (0.3.0): SkyRL swaps gradients with the adapter.
Limits    from 0.2.0 on SkyRL divides the policy's and cross-entropy losses by the whole batch's counts, so calls
          add up, as in 0.4.0; KL, entropy, router and draft losses are means over each call, added up all the
          same. In 0.1.0 all losses are means over microbatches; with the patch, over those of the whole step.
          A call that raises drops the gradients of the calls before it; optim_step then raises. So does an
          optim_step that raises before the optimizer has stepped. While a step is open, offloading gradients is
          refused: it would lose them, as in 0.4.0.
Numbers   change where a step has several calls; those of a step of one call stay.
Cost      as upstream's: gradients are reduced in optim_step, after the backward pass and not during it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..._python.dotted import find, temporarily_set
from ...errors import MisuseError
from ...patch import ABSENT, FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, gone, unmet

if TYPE_CHECKING:
    from ...train_step import TrainStep  # most processes that import this have no such worker

MODULES = (
    "skyrl_train.workers.megatron.megatron_worker",
    "skyrl.backends.skyrl_train.workers.megatron.megatron_worker",
)
WORKER = "MegatronPolicyWorkerBase"

_steps: weakref.WeakKeyDictionary[Any, dict[Any, TrainStep]] = weakref.WeakKeyDictionary()
"""By worker and adapter, the step that optim_step has not finished yet."""


def diagnose(module: ModuleType) -> Verdict:
    """Read the real methods: running them needs a model."""
    own = vars(getattr(module, WORKER, object))
    if "forward_backward" not in own:  # others' is right
        if "ppo_train" in own:
            return Verdict(ABSENT, f"this version has no {WORKER}.forward_backward: it trains in ppo_train()")
        return gone(f"{WORKER}.forward_backward", module)
    path = f"{module.__name__}:{WORKER}"
    zeroed_before = not unmet.names(f"{path}.forward_backward", "zero_grad_buffer")
    zeroed_after = not unmet.names(f"{path}.optim_step", "zero_grad_buffer")
    if zeroed_after and not zeroed_before:
        return Verdict(FIXED, "optim_step zeroes gradients, forward_backward does not")
    expect_none(
        *unmet.names(
            f"{path}.forward_backward", "zero_grad_buffer", "actor_module", "model", "forward_backward_mini_batch"
        ),
        *unmet.names(f"{path}.optim_step", "optimizer_step", "optimizer"),
        *unmet.parameters(f"{module.__name__}:MegatronModelWrapper.forward_backward_mini_batch", "micro_batches"),
        *unmet.parameters(f"{path}.offload_to_cpu", "offload_optimizer"),
    )
    return Verdict(NEEDED, "each forward_backward zeroes the gradients of those before it")


# ---------------------------------------------------------------------------- the step of a worker
def _current_adapter(worker: Any) -> Any:
    """Return the adapter whose gradients are in the buffers; None where there are no adapters to swap."""
    return find(worker, "adapter_store.current_id")


def _step_of(worker: Any) -> TrainStep | None:
    """Return the live adapter's step, made the open one of the model; None if optim_step has nothing to do."""
    steps = _steps.get(worker)
    if not steps:
        return None
    from ...train_step import open_step

    step, current = steps.get(_current_adapter(worker)), open_step(worker.actor_module)
    if current is not None and current is not step:
        current.set_aside()
    if step is not None and step.is_open and step is not current:
        step.take_up()
    return step


def _begin_step(worker: Any, calls_add_up: bool) -> TrainStep:
    step = _step_of(worker)
    if step is None:
        from ...train_step import TrainStep

        step = TrainStep(worker.actor_module, worker.optimizer, calls_add_up=calls_add_up)
        _steps.setdefault(worker, {})[_current_adapter(worker)] = step
    if not step.is_open:
        step.begin()
    return step


def drop_step(worker: Any) -> None:
    """Zero the gradients of all calls since the last optim_step(), whichever release the worker is of."""
    step = _step_of(worker)
    if step is not None:
        step.abort()
        del _steps[worker][_current_adapter(worker)]
        return
    from ...train_step import TrainStep

    step = TrainStep(worker.actor_module, worker.optimizer)
    step.begin()
    step.abort()
    if hasattr(worker.model, "_pending_grad_sync"):  # what 0.4.0 leaves for its optim_step
        worker.model._pending_grad_sync = None


# ---------------------------------------------------------------------------- what is installed
def accumulate_until_optim_step(forward_backward: Callable[..., Any]) -> Callable[..., Any]:
    path = f"{forward_backward.__module__}:{WORKER}.forward_backward"
    undoes_mean = not unmet.names(path, "num_microbatches")  # by passing it to the loss function

    @functools.wraps(forward_backward)
    def patched_forward_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = _begin_step(self, calls_add_up=undoes_mean)
        mini_batch = self.model.forward_backward_mini_batch
        not_zeroing = contextlib.ExitStack()

        def accumulating_mini_batch(micro_batches: Any, *args: Any, **kwargs: Any) -> Any:
            not_zeroing.close()  # by now SkyRL has done its zeroing
            with step.accumulate(len(micro_batches)):
                return mini_batch(micro_batches, *args, **kwargs)

        try:
            with not_zeroing, temporarily_set(self.model, forward_backward_mini_batch=accumulating_mini_batch):
                for chunk in self.actor_module:
                    not_zeroing.enter_context(temporarily_set(chunk, zero_grad_buffer=lambda: None))
                return forward_backward(self, *args, **kwargs)
        except BaseException:
            step.abort()
            raise

    return patched_forward_backward


def reduce_before_optim_step(optim_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(optim_step)
    def patched_optim_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = _step_of(self)
        if step is not None:
            if not step.is_open:
                raise MisuseError(
                    "optim_step(): a forward_backward() or optim_step() has raised, and the gradients of those "
                    "before it were dropped with its own; repeat all these calls of forward_backward()"
                )
            step.reduce()
        try:
            result = optim_step(self, *args, **kwargs)
        except BaseException:
            if step is not None:
                step.abort()  # unless the optimizer has stepped
            raise
        if step is not None:
            del _steps[self][_current_adapter(self)]
        return result

    return patched_optim_step


def refuse_offload_in_open_step(offload_to_cpu: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(offload_to_cpu)

    @functools.wraps(offload_to_cpu)
    def patched_offload_to_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        step = _step_of(self)
        if bound.arguments["offload_optimizer"] and step is not None and step.is_open:
            raise MisuseError(
                "offload_to_cpu() would lose the gradients of forward_backward: call optim_step() first"
            )
        return offload_to_cpu(self, *args, **kwargs)

    return patched_offload_to_cpu


PATCH = Patch(
    name="skyrl.accumulate-forward-backward",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/2008",
    sites=tuple(
        Site(
            module,
            diagnose,
            replace={
                f"{WORKER}.forward_backward": accumulate_until_optim_step,
                f"{WORKER}.optim_step": reduce_before_optim_step,
                f"{WORKER}.offload_to_cpu": refuse_offload_in_open_step,
            },
        )
        for module in MODULES
    ),
    changes_numbers=True,
)
