"""A step of Megatron's DistributedDataParallel, by Megatron's own switches on the model config.

Each call runs with the chunks in no_sync(), without the config's own no_sync_func, grad_sync_func and
param_sync_func, and with a finalize_model_grads_func that records its arguments. The schedule divides losses by
the microbatches of its call; grad_scale_func multiplies by them again. `finish` divides the gradient by the total
of the whole step, starts the reduce where overlap needs it, and calls the real finalize once.

A call that is said to be the last runs as Megatron's own: without no_sync() around it, with the config's hooks
and the real finalize. The step's divisor is known then, so the gradients are divided before it, and its losses as
they are scaled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._mcore.bucket_groups import (
    begin_lines,
    bucket_groups,
    forget_first_step,
    settle_grad_reduces,
)
from .._mcore.logged_losses import OwnLosses
from .._mcore.rerun_machine import machine_of_this_process, rewind_interrupted_step
from .._mcore.step_state import COUNTS, StepState, buffers, copy_into, copy_of, forget_counts
from .._python.dotted import temporarily_set
from ..errors import MisuseError
from ._normalization import LossScaling, Normalization, check_normalizer
from ._result import StepResult


class MegatronStep:
    """The work of a TrainStep, whose checks its methods need not repeat."""

    def __init__(
        self,
        chunks: list[Any],
        optimizer: Any,
        scheduler: Any,
        *,
        expected_count: float | None,
        expected_microbatches: int | None,
        calls_add_up: bool,
        step_scheduler_on_skip: bool,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.utils import get_model_config

        if any(getattr(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False) for chunk in chunks):
            raise MisuseError(
                "reuse_grad_buf_for_mxfp8_param_ag is not supported: parameters and gradients share memory"
            )
        self.chunks, self.optimizer, self.scheduler = chunks, optimizer, scheduler
        self.step_scheduler_on_skip = step_scheduler_on_skip
        self.config = get_model_config(chunks[0])
        self.parallel = parallel_state
        self.normalization = Normalization(
            expected_count, expected_microbatches, calls_add_up, self.config, parallel_state
        )
        self.config_hooks = contextlib.ExitStack()  # those of a call, as long as they are set
        self.forget()

    def forget(self) -> None:
        """Forget the step before, as far as it could still be dropped."""
        self.normalization.forget()
        self.calls = 0
        self.num_tokens: Any = None
        self.finalize_arguments: dict[str, Any] = {}
        self.factor = 1.0  # for the losses of the last call
        self.normalizer: float | None = None
        self.is_last = self.is_reduced = False
        self.state: StepState | None = None  # before the step; None once the optimizer has stepped
        self.losses = OwnLosses()

    # ------------------------------------------------------------------------ begin and calls
    def begin(self) -> None:
        self.state = StepState(self.chunks, self.optimizer, logged=False)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            forget_counts(chunk)
        self.optimizer.zero_grad()

    def set_aside(self) -> None:
        if self.is_last:  # finalize has moved a router's bias, which a step in between would move further
            raise MisuseError("set_aside(): the last call of this step was made; call finish() or abort()")
        self.put_counts_back = _counts_of(self.chunks)

    def take_up(self) -> None:
        """Have bucket groups forget the reduce of the step in between; zero_grad_buffer() would zero gradients."""
        for chunk in self.chunks:
            forget_first_step(chunk, if_partly_seen=True)
            begin_lines(chunk)
            for group in bucket_groups(chunk):
                group.reset()
        self.state = StepState(self.chunks, self.optimizer, logged=False)  # a step in between has moved the rest
        self.put_counts_back()

    @contextlib.contextmanager
    def accumulate(self, num_microbatches: int, count: float | None, last: bool) -> Iterator[None]:
        if self.is_last:
            raise MisuseError("the last call of this step was made: finish() it")
        self.normalization.add(num_microbatches, count)
        finalized_before, self.is_last = self.calls, last
        if last:
            self._divide()
        scaling = LossScaling(self.normalization, num_microbatches, self.factor)
        with contextlib.ExitStack() as stack:
            for chunk in () if last else self.chunks:
                stack.enter_context(chunk.no_sync())
            stack.enter_context(self._hooks(scaling))
            stack.enter_context(self.losses.added_by_call())
            yield
        if self.calls != finalized_before + 1:
            raise MisuseError(
                f"accumulate() takes exactly one call of a schedule, with forward_only=False; "
                f"it got {self.calls - finalized_before}"
            )
        if scaling.losses not in (0, num_microbatches):  # 0: only the last pipeline stage scales a loss
            raise MisuseError(
                f"num_microbatches is {num_microbatches}; the schedule was called with {scaling.losses}"
            )

    def forward_backward(self, num_microbatches: int, **arguments: Any) -> Any:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()(
            model=self.chunks, num_microbatches=num_microbatches, forward_only=False, **arguments
        )

    @contextlib.contextmanager
    def _hooks(self, scaling: LossScaling) -> Iterator[None]:
        config = self.config
        hooks: dict[str, Any] = {**scaling.functions(config), "finalize_model_grads_func": self._finalize_later}
        if self.is_last:
            hooks["finalize_model_grads_func"] = self._finalize_now
            hooks["no_sync_func"] = config.no_sync_func or _no_sync_of(self.chunks)
        else:
            hooks["no_sync_func"] = contextlib.nullcontext  # the schedule's own ends before its last microbatch
            hooks["grad_sync_func"] = None
        if self.calls:  # the first one has gathered the parameters
            hooks["param_sync_func"] = None
        self.finalize = config.finalize_model_grads_func
        with self.config_hooks:
            self.config_hooks.enter_context(temporarily_set(config, **hooks))
            yield

    def _finalize_later(self, model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        self.finalize_arguments = kwargs
        if num_tokens is not None:
            self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens

    def _finalize_now(self, model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> None:
        self._finalize_later(model, num_tokens, *args, **kwargs)
        self._finalize(self.finalize)
        self.is_reduced = True

    # ------------------------------------------------------------------------ finish and abort
    def finish(self, increment: int | None) -> StepResult:
        if self.scheduler is not None and increment is None:
            raise MisuseError(
                "finish() needs increment=, the samples of this step over all ranks, for the scheduler"
            )
        normalizer = self.reduce()
        learning_rate, weight_decay = self._largest("lr"), self._largest("weight_decay")  # before the scheduler
        result = self.optimizer.step()
        self.state = None
        succeeded, grad_norm, num_zeros = self._over_model_parallel(*result)
        if self.scheduler is not None and (succeeded or self.step_scheduler_on_skip):
            self.scheduler.step(increment=increment)
        return StepResult(
            succeeded=succeeded,
            grad_norm=grad_norm,
            num_zeros=None if num_zeros is None else int(num_zeros),
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            num_microbatches=self.normalization.microbatches,
            num_calls=self.calls,
            normalizer=normalizer,
        )

    def reduce(self) -> float:
        if not self.calls and not self._may_have_none():
            raise MisuseError("a step needs at least one forward-backward call on this rank")
        if any(map(_is_freed, self.chunks)):
            raise MisuseError("gradient buffers were freed while the step was open: its gradients are lost")
        if not self.is_reduced:
            self._divide()
            for chunk in self.chunks:
                if chunk.ddp_config.overlap_grad_reduce:
                    _start_grad_reduces(chunk)
            self._finalize(self.config.finalize_model_grads_func)
        if self.normalizer is None:
            self.normalizer = float(self.num_tokens)  # finalize has summed it over all ranks
            check_normalizer(self.normalizer, "tokens")
        return self.normalizer

    def _largest(self, name: str) -> float:
        return max((float(group.get(name, 0.0)) for group in self.optimizer.param_groups), default=0.0)

    def _may_have_none(self) -> bool:
        """Return whether a rank may have no data: no other rank waits for its messages."""
        mpu = self.parallel
        sizes = (
            mpu.get_tensor_model_parallel_world_size(),
            mpu.get_pipeline_model_parallel_world_size(),
            mpu.get_context_parallel_world_size(),
            mpu.get_expert_model_parallel_world_size(),
        )
        return not self.normalization.by_tokens and set(sizes) == {1}

    def _divide(self) -> None:
        """Divide the gradients so far by the total of the step, as far as Megatron's finalize does not."""
        self.factor, self.normalizer = self.normalization.total(self._device())
        if self.factor != 1.0 and self.calls:
            for chunk in self.chunks:
                chunk.scale_gradients(self.factor)

    def _finalize(self, finalize: Callable[..., Any] | None) -> None:
        from megatron.core.distributed import finalize_model_grads

        num_tokens = self.num_tokens if self.normalization.by_tokens else None
        (finalize or finalize_model_grads)(self.chunks, num_tokens, **self.finalize_arguments)

    def _over_model_parallel(
        self, succeeded: bool, grad_norm: float | None, num_zeros: float | None
    ) -> tuple[bool, float | None, float | None]:
        """Agree on the result: ranks with nothing to train have seen neither a norm nor an overflow."""
        import torch

        group = self.parallel.get_model_parallel_group()
        if group.size() == 1:
            return bool(succeeded), None if grad_norm is None else float(grad_norm), num_zeros
        none = -1.0
        known = [none if value is None else float(value) for value in (grad_norm, num_zeros)]
        found = torch.tensor([not succeeded, *known], dtype=torch.float64, device=self._device())
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
        failed, *values = found.tolist()
        norm, zeros = (None if value == none else value for value in values)
        return not failed, norm, zeros

    def abort(self) -> None:
        import torch

        self.config_hooks.close()
        if torch.cuda.is_initialized():  # a backward pass that was interrupted has joined none of its streams
            torch.cuda.synchronize()
        for chunk in self.chunks:
            settle_grad_reduces(chunk)
            forget_first_step(chunk)
            if not _is_freed(chunk):
                chunk.zero_grad_buffer()
            forget_counts(chunk)
        self.optimizer.zero_grad()
        if self.state is not None:
            self.state.put_back()
            self.losses.take_away()
        if (machine := machine_of_this_process()) is not None:
            rewind_interrupted_step(machine)
        self.forget()

    def abort_aside(self) -> None:
        """Drop a step that was set aside: the gradients in the model may be another's."""
        self.losses.take_away()
        self.forget()

    # ------------------------------------------------------------------------ the layout
    def _device(self) -> Any:
        return next(self.chunks[0].parameters()).device  # if all are frozen, there are no gradient buffers


def _no_sync_of(chunks: list[Any]) -> Any:
    return [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync


def _is_freed(chunk: Any) -> bool:
    """Return whether some of the chunk's gradients have no memory. Writing there would crash the process."""
    buffers = [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return any(data.numel() and not data.untyped_storage().size() for data in buffers)


def _start_grad_reduces(ddp: Any) -> None:
    """Start the reduces of a chunk with overlap_grad_reduce that its finish_grad_sync() would only wait for.

    From 0.16 on, finish_grad_sync() itself starts a bucket group that has not learned yet when its gradients are
    ready (`is_first_batch`). Started here as well, such a group would be reduced twice where nothing remembers the
    first start: with several distributed optimizer instances there is no handle.
    """
    for group in bucket_groups(ddp):
        if not getattr(group, "is_first_batch", False):
            group.start_grad_sync()


def _counts_of(chunks: Iterable[Any]) -> Callable[[], None]:
    """Return a function that puts the counts of these chunks back as they are now."""
    copies = [(chunk, copy_of(list(buffers(chunk, COUNTS)))) for chunk in chunks]

    def put_back() -> None:
        for chunk, copy in copies:
            copy_into(list(buffers(chunk, COUNTS)), copy)

    return put_back
