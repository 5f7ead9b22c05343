"""A step of a module with FSDP2's fully_shard applied, whose ranks are data parallel, all or in named dimensions.

FSDP2 gathers and reduces in every forward and backward pass, so all ranks have to make the same number of them: a
rank with fewer microbatches makes extra passes, whose loss does not count. FSDP2 averages gradients over ranks in
each pass; `finish` turns that back into the sum and divides it by the total of the step.

The parameters are those of the optimizer: after a forward pass without a backward the module has gathered ones.

An exception leaves a pass half done. All ranks have to have left it in the same place, or their next collectives
do not match: if only one rank fails, the others wait, and the processes have to be ended.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import MisuseError
from ._backend import Options, StepResult, check_normalizer, used_by_optimizer
from ._fsdp2_module import gradient_divisor, mesh_of, reset_after_interruption, sharded_modules


class _Backward:
    """Takes the place of ``loss.backward()``.

    It is called `passes` times, which is the number of microbatches of the rank with the most of them. The
    loss of passes after a rank's own microbatches does not count.
    """

    def __init__(self, num_microbatches: int, passes: int, divisor: float) -> None:
        self.num_microbatches, self.passes, self.divisor = num_microbatches, passes, divisor
        self.made = 0

    def __call__(self, loss: Any) -> None:
        self.made += 1
        weight = 1.0 / self.divisor if self.made <= self.num_microbatches else 0.0
        (loss * weight).backward()


class FSDP2Backend:
    fewest_microbatches = 0

    def __init__(self, chunks: list[Any], optimizer: Any, scheduler: Any, options: Options) -> None:
        self.max_grad_norm = options.max_grad_norm
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise MisuseError(f"max_grad_norm is {self.max_grad_norm!r}; expected a number above 0, or None")
        if options.calls_add_up:
            raise MisuseError("calls_add_up is for Megatron; with FSDP2 use a mean or an expected_count")
        self.chunks, self.optimizer, self.scheduler = chunks, optimizer, scheduler
        self.expected_count = options.expected_count
        self.expected_microbatches = options.expected_microbatches
        self.mesh = mesh_of(self._parameters(), options.data_parallel_dims)
        self.drawn: list[Any] = []  # by the last microbatch: kept over steps, for passes that do not count
        self._forget()

    def _parameters(self) -> list[Any]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _parameters_with_gradients(self) -> list[Any]:
        return [parameter for parameter in self._parameters() if parameter.grad is not None]

    def _forget(self) -> None:
        self.calls = self.microbatches = 0
        self.divisor = float(self.expected_count or self.expected_microbatches or 0)
        self.count = 0.0

    # ------------------------------------------------------------------------ begin and calls
    def begin(self) -> None:
        self._forget()
        self.chunks[0].set_requires_gradient_sync(True)  # else the optimizer would not see the gradient
        self.chunks[0].set_is_last_backward(True)
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def accumulate(self, num_microbatches: int, count: float | None, last: bool) -> Iterator[_Backward]:
        most, self.fewest = self._most_and_fewest(num_microbatches)
        self.divisor = self.divisor or most
        self.backward = _Backward(num_microbatches, most, self.divisor)
        yield self.backward
        if self.backward.made != most:
            raise MisuseError(
                f"the call made {self.backward.made} backward passes; expected {most}, as many as the rank with "
                "the most microbatches makes (forward_backward() makes the missing ones)"
            )
        self.calls += 1
        self.microbatches += num_microbatches
        self.count += num_microbatches if count is None else count

    def set_aside(self) -> None: ...

    def take_up(self) -> None: ...

    def forward_backward(
        self, num_microbatches: int, *, forward_step_func: Callable[..., Any], data_iterator: Any, **ignored: Any
    ) -> list[Any]:
        """Make the passes of Megatron's schedule without a pipeline; arguments for pipelines are ignored."""
        if self.fewest == 0 and self.backward.passes:  # the same on all ranks, so that none waits for another
            lacks_data = num_microbatches == 0 and not self.drawn
            if self._over_ranks(lacks_data, "MAX"):
                raise MisuseError(
                    "a rank has no microbatches in this call, unlike others, and has never had any; give it data "
                    "with a count of 0, so that it takes part in their gathers and reduces"
                )
        metrics = []
        for _ in range(num_microbatches):
            self.drawn = []
            metrics.append(self._forward_backward(forward_step_func, _Recording(data_iterator, self.drawn)))
        again = itertools.cycle(self.drawn)
        for _ in range(self.backward.passes - num_microbatches):
            self._forward_backward(forward_step_func, again)
        return metrics

    def _forward_backward(self, forward_step_func: Callable[..., Any], data: Iterator[Any]) -> Any:
        output, loss_func = forward_step_func(data, self.chunks[0])
        loss, *more = loss_func(output)
        if len(more) != 1:
            raise MisuseError(
                f"the loss function returned {1 + len(more)} values; with FSDP2 expected (loss, metrics). For the "
                "mean over tokens, return the sum, in a step with an expected_count"
            )
        self.backward(loss)
        return more[0]

    # ------------------------------------------------------------------------ finish and abort
    def reduce(self) -> float:
        normalizer = self._over_ranks(self.count, "SUM")
        check_normalizer(normalizer, "microbatches" if self.expected_count is None else "counts")
        parameters = self._parameters_with_gradients()
        if not parameters:
            raise MisuseError("no parameter of the optimizer has a gradient")
        factor = self.divisor * gradient_divisor(self.chunks[0], self.mesh.size()) / normalizer
        for parameter in parameters:
            parameter.grad.mul_(factor)
        for module in sharded_modules(self.chunks[0]):
            module.reshard()  # else parameters gathered by a forward pass without a backward are kept for the next
        return normalizer

    def finish(self, increment: int | None) -> StepResult:
        normalizer = self.reduce()
        grad_norm = self._clip(self._parameters_with_gradients())
        learning_rate, weight_decay = used_by_optimizer(self.optimizer)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return StepResult(
            succeeded=True,
            grad_norm=grad_norm,
            num_zeros=None,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            num_microbatches=self.microbatches,
            num_calls=self.calls,
            normalizer=normalizer,
        )

    def _clip(self, parameters: list[Any]) -> float | None:
        """Clip by the norm of all parameters; those that are tensor parallel have a mesh of their own.

        The norm is made for clipping only: it takes a collective, and a wait for the device.
        """
        if self.max_grad_norm is None:
            return None
        import torch
        from torch.nn import utils

        on_mesh: dict[Any, list[Any]] = {}
        for parameter in parameters:
            on_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter)
        norms = [
            utils.get_total_norm([parameter.grad for parameter in group]).full_tensor()
            for group in on_mesh.values()
        ]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        for group in on_mesh.values():
            utils.clip_grads_with_norm_(group, self.max_grad_norm, norm)
        return float(norm)

    def abort(self) -> None:
        reset_after_interruption(self.chunks[0])
        self.optimizer.zero_grad()
        self.drawn = []  # the pass may have failed because of it
        self._forget()

    def abort_aside(self) -> None:
        self._forget()

    # ------------------------------------------------------------------------ the ranks
    def _most_and_fewest(self, number: int) -> tuple[int, int]:
        most, fewest = self._all_reduce([number, -number], "MAX")
        return int(most), -int(fewest)

    def _over_ranks(self, value: float, operation: str) -> float:
        (found,) = self._all_reduce([value], operation)
        return found

    def _all_reduce(self, values: list[float], operation: str) -> list[float]:
        import torch

        found = torch.tensor(values, dtype=torch.float64, device=self.mesh.device_type)
        for dimension in range(self.mesh.ndim):
            operator = getattr(torch.distributed.ReduceOp, operation)
            torch.distributed.all_reduce(found, op=operator, group=self.mesh.get_group(dimension))
        return list(found.tolist())


class _Recording:
    """The items of an iterator, which are also appended to `drawn`."""

    def __init__(self, data: Any, drawn: list[Any]) -> None:
        self.data, self.drawn = data, drawn

    def __iter__(self) -> _Recording:
        return self

    def __next__(self) -> Any:
        self.drawn.append(next(self.data))
        return self.drawn[-1]
