"""A module with FSDP2's fully_shard applied: its mesh, its gradient divisor, and its reset after a broken pass."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import MisuseError

MODULE = "torch.distributed.fsdp"


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
