"""The parameters that several ranks have alike, and the groups of these ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .._engine.ranks import numbered

DATA, EXPERT_DATA, TENSOR = "data-parallel", "expert-data-parallel", "tensor-parallel"


class Replicas(NamedTuple):
    """Parameters that all ranks of a group have alike."""

    what: str
    group: Any
    parameters: list[Any]


def replicas_of(parameters: list[Any]) -> Iterator[Replicas]:
    """Yield the parameters that this rank and others have, by group, if it has more than one rank."""
    from megatron.core import parallel_state

    dense = [parameter for parameter in parameters if getattr(parameter, "allreduce", True)]
    experts = [parameter for parameter in parameters if not getattr(parameter, "allreduce", True)]
    whole = [parameter for parameter in dense if not getattr(parameter, "tensor_model_parallel", False)]
    tied = [parameter for parameter in dense if getattr(parameter, "shared_embedding", False)]
    found = [
        Replicas(
            DATA,
            _replicating(parallel_state.get_data_parallel_group, with_context_parallel=True),
            dense,
        ),
        Replicas(TENSOR, parallel_state.get_tensor_model_parallel_group(), whole),
    ]
    if experts:
        group = _replicating(parallel_state.get_expert_data_parallel_group)
        found.append(Replicas(EXPERT_DATA, group, experts))
    if tied and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        found.append(Replicas("embedding", parallel_state.get_embedding_group(), tied))
    return (replicas for replicas in found if replicas.parameters and replicas.group.size() > 1)


def ranks_of(replicas: Replicas) -> str:
    """Return the ranks of their group, in words."""
    import torch.distributed as dist

    try:
        ranks = numbered("rank", dist.get_process_group_ranks(replicas.group))
    except KeyError:  # torch knows a group that was destroyed no more
        ranks = "of a layout that was taken down"
    return f"all {replicas.what} ranks ({ranks})"


def _replicating(get_group: Callable[..., Any], **options: Any) -> Any:
    """Return a group of ranks with the same weights: from 0.19 on, without those that GTP shards weights over."""
    if "with_gtp_remat" in inspect.signature(get_group).parameters:
        options["with_gtp_remat"] = False
    return get_group(**options)
