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
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import MisuseError
from ._backend import Options, StepResult, check_normalizer, used_by_optimizer

MODULE = "torch.distributed.fsdp"


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
        self.forget()

    def _parameters(self) -> list[Any]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _parameters_with_gradients(self) -> list[Any]:
        return [parameter for parameter in self._parameters() if parameter.grad is not None]

    def forget(self) -> None:
        self.calls = self.microbatches = 0
        self.divisor = float(self.expected_count or self.expected_microbatches or 0)
        self.count = 0.0

    # ------------------------------------------------------------------------ begin and calls
    def begin(self) -> None:
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
        self.forget()

    def abort_aside(self) -> None:
        self.forget()

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


# ---------------------------------------------------------------------------- the module
def chunks_of(model: Any) -> list[Any] | None:
    """Return the model as the only chunk if fully_shard was applied to it, else None."""
    sharded = getattr(sys.modules.get(MODULE), "FSDPModule", None)
    return [model] if sharded is not None and isinstance(model, sharded) else None


def sharded_modules(module: Any) -> list[Any]:
    return [submodule for submodule in module.modules() if chunks_of(submodule) is not None]


def mesh_of(parameters: list[Any], dims: tuple[str, ...] | None) -> Any:
    """Return the mesh of data parallel ranks, over which all parameters are sharded or replicated.

    Args:
        parameters: the optimizer's.
        dims: the names of its dimensions; None if parameters have no others.
    """
    from torch.distributed.tensor import DTensor

    if not all(isinstance(parameter, DTensor) for parameter in parameters):
        raise MisuseError(
            "the optimizer has parameters that fully_shard did not shard; build it from the module's parameters, "
            "after fully_shard and before the first forward pass"
        )
    if dims is not None:
        meshes = {_named_part(parameter.device_mesh, dims) for parameter in parameters}
        if len(meshes) != 1:
            raise MisuseError(f"the dimensions {', '.join(dims)} are those of several meshes; expected one")
        return meshes.pop()
    meshes = {parameter.device_mesh for parameter in parameters}
    layouts = [[placement.is_shard() for placement in parameter.placements] for parameter in parameters]
    if len(meshes) != 1 or any(layout not in ([True], [False, True]) for layout in layouts):
        raise MisuseError(
            "with FSDP2 all ranks have to be data parallel; found tensor parallelism or several meshes. Name the "
            'dimensions of the mesh that are data parallel: data_parallel_dims=("data",)'
        )
    return meshes.pop()


def _named_part(mesh: Any, dims: tuple[str, ...]) -> Any:
    names = tuple(mesh.mesh_dim_names or ())
    if missing := [name for name in dims if name not in names]:
        raise MisuseError(
            f"data_parallel_dims has {', '.join(missing)}; a parameter's mesh has "
            f"{', '.join(names) or 'dimensions without names'}"
        )
    return mesh if names == dims else mesh[dims]


# ---------------------------------------------------------------------------- without a public name in torch
# Only FSDP2's own code describes its state. It was read, and is tested, in torch 2.13.0:
# https://github.com/pytorch/pytorch/tree/v2.13.0/torch/distributed/fsdp/_fully_shard (_fsdp_state.py: FSDPState,
# _fsdp_param_group.py: FSDPParamGroup, _fully_shard.py: FSDPModule). There FSDPState has a list of parameter
# groups; before it had a single one, `_fsdp_param_group`.
def gradient_divisor(module: Any, ranks: int) -> float:
    """Return the divisor of gradients in FSDP2: the number of ranks, or the set_gradient_divide_factor()."""
    found = set()
    for submodule in sharded_modules(module):
        state = submodule._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        found |= {getattr(group, "gradient_divide_factor", None) or ranks for group in groups if group is not None}
    if len(found) != 1:
        factors = ", ".join(f"{factor:g}" for factor in sorted(found))
        raise MisuseError(f"gradients are divided by several numbers: {factors}; expected one for all modules")
    return float(found.pop())


def reset_after_interruption(module: Any) -> None:
    """Make the next pass of a module a normal one, even if its last pass was interrupted.

    Otherwise its gathered parameters stay, and the next backward pass takes itself for a part of the last one, so
    that some gradients are not reduced at all.
    """
    for parameter in module.parameters():  # the gathered ones too, which have gradients until they are reduced
        parameter.grad = None
    state = module._get_fsdp_state()
    if not getattr(state, "_is_root", True):  # no forward pass was ever made: there is nothing to reset
        return
    if hasattr(module, "reset_iter_state"):  # public, in torch 2.13
        module.reset_iter_state()
    else:  # as FSDP2 does at the end of each backward pass; without gradients it reduces nothing
        state._root_post_backward_final_callback()
        state._state_ctx.iter_forward_root = None  # older versions do this at the end of the forward pass
