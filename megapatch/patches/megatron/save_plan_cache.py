"""A cached save plan is used only for the structure that it was made for.

Symptom   with --ckpt-assume-constant-structure every save uses the plan of the first one. Anything added since is
          silently not in the checkpoint: "Missing key in checkpoint state_dict: ..." when it is loaded.
          If something was removed, the save ends with "ValueError: Could not find FQN: ..."; if it was removed on
          one rank only, the others hang. A tensor whose offset has changed is saved in its old place (before 0.15
          the save ends with "Could not find shard"). With --ckpt-fully-parallel-save no rank is assigned to save a
          new tensor.
Upstream  unfixed in 0.12 to 0.19 and on main: NVIDIA/Megatron-LM#4378, its "Option 1".
Seam      class attributes. Before TorchDistSaveShardedStrategy.async_save, which every save of a torch_dist
          checkpoint goes through, the sharded leaves (type, key, dtype, shapes, offset, replica) are compared with
          those of the last save. If they differ on any rank, all ranks forget their plans and metadata, and
          Megatron plans as for a first save. Likewise before FullyParallelSaveStrategyWrapper's
          apply_saving_parallelization, where the distribution of tensors over ranks is forgotten.
          Deciding on each rank by itself is not an option: planning is collective, and its peers would hang.
Limits    a structure that changes with every save is planned at every save, as without the flag; so is one whose
          last save failed. Ranks that disagree on the flag, or save without the others, hang as before.
          NVRx's async writer (the default from 0.17 on): its plans and metadata in the strategy are covered, its
          worker process's cache of GPU tensors is not. Nor are fsdp_dtensor and torch_dcp, local non-persistent
          checkpoints, and a distribution read from a file (pg_cache_path, on main).
Numbers   change in checkpoints of a structure that has changed, to those of a save without the flag.
Cost      without the flag none. With it, at each save a pass over the leaves and an all-reduce of two bytes, and
          both again with --ckpt-fully-parallel-save: with 10,000 leaves on a rank below 2% of planning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..._mcore.devices import device_of
from ..._mcore.sharded_leaves import FLAG, NVRX, OBJECT_FIELDS, PLANS, TENSOR_FIELDS, structure
from ..._mcore.side_table import SideTable
from ..._python.dotted import find
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import answering_none, expect_none, running, torch_stand_in, unmet, with_globals

PLANS_MODULE = "megatron.core.dist_checkpointing.strategies.torch"
STRATEGY = f"{PLANS_MODULE}:TorchDistSaveShardedStrategy"
DISTRIBUTION_MODULE = "megatron.core.dist_checkpointing.strategies.fully_parallel"
WRAPPER = f"{DISTRIBUTION_MODULE}:FullyParallelSaveStrategyWrapper"
METADATA = "cached_global_metadata"
REUSE = "validated_cache_reuse"
STRUCTURE = SideTable()
"""Of a strategy or wrapper the leaves of its last save, unless that failed."""


def _changed_anywhere(owner: Any, now: list[tuple[Any, ...]], cached: bool) -> bool:
    """Return whether the cache is for another structure, with the same answer on all ranks.

    No rank may decide by itself: planning is collective, and its peers would wait for it. This removes the
    previous structure, so a save that fails leaves none.
    """
    import torch

    changed = STRUCTURE.pop(owner) != now
    # After a failure one rank may have nothing cached while others have a plan; together that counts as a change.
    somewhere = torch.tensor([cached, changed], dtype=torch.int8, device=device_of())
    torch.distributed.all_reduce(somewhere, op=torch.distributed.ReduceOp.MAX)
    return all(somewhere.tolist())


# ------------------------------------------------------------------------------------------ the plans
def replan_when_changed(async_save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(async_save)
    def patched_async_save(self: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.use_cached_ckpt_structure or not isinstance(sharded_state_dict, dict):
            STRUCTURE.pop(self)  # this save caches plans too, for a structure not compared
            return async_save(self, sharded_state_dict, *args, **kwargs)
        now = structure(sharded_state_dict)
        planned = any(getattr(self, name, None) is not None for name in (*PLANS, NVRX))
        if _changed_anywhere(self, now, cached=planned):
            _forget_plans(self)
        saving = async_save(self, sharded_state_dict, *args, **kwargs)
        STRUCTURE.set(self, now)
        return saving

    return patched_async_save


def _forget_plans(strategy: Any) -> None:
    for name in (*PLANS, METADATA):
        setattr(strategy, name, None)
    setattr(strategy, REUSE, False)
    if (cache := getattr(strategy, NVRX, None)) is not None:
        # Not None: Megatron would fill a new cache with the metadata, which only one rank has after a save.
        setattr(strategy, NVRX, type(cache)())


# ------------------------------------------------------------------------------------------ the distribution
def redistribute_when_changed(apply_saving_parallelization: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply_saving_parallelization)
    def patched_apply_saving_parallelization(self: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.do_cache_distribution or not isinstance(sharded_state_dict, dict):
            return apply_saving_parallelization(self, sharded_state_dict, *args, **kwargs)
        now = structure(sharded_state_dict)
        # Of all ranks, not only the wrapper's group: all of them validate a new distribution together.
        if _changed_anywhere(self, now, cached=self.cached_distribution is not None):
            self.cached_distribution = None
        result = apply_saving_parallelization(self, sharded_state_dict, *args, **kwargs)
        STRUCTURE.set(self, now)
        return result

    return patched_apply_saving_parallelization


# ------------------------------------------------------------------------------------------ the diagnoses
def diagnose_plans(module: ModuleType) -> Verdict:
    """Save one structure twice and then another with the real async_save, without planning or writing."""
    expect_none(
        *unmet.names(f"{STRATEGY}.__init__", FLAG, *PLANS, METADATA, REUSE),
        *unmet.parameters(f"{STRATEGY}.async_save", "sharded_state_dict"),
        *_missing_fields(module),
    )
    with running("async_save()"):
        again, changed = _plans_reused(module)
    if not again:
        return Verdict(UNKNOWN, "expected the plan to be reused for the same structure, and it is not")
    if changed:
        return Verdict(NEEDED, "the plan is reused although the structure has changed")
    return Verdict(FIXED, "a changed structure is planned again")


def diagnose_distribution(module: ModuleType) -> Verdict:
    """Distribute one structure twice and then another with the real method, without any communication."""
    expect_none(
        *unmet.names(f"{WRAPPER}.__init__", "do_cache_distribution", "cached_distribution"),
        *unmet.parameters(f"{WRAPPER}.apply_saving_parallelization", "sharded_state_dict"),
        *unmet.names(f"{WRAPPER}.save", "apply_saving_parallelization"),
        *unmet.names(f"{WRAPPER}.async_save", "apply_saving_parallelization"),
        *_missing_fields(module),
    )
    with running("apply_saving_parallelization()"):
        made = _distributions_after_each_save(module)
    if made == [1, 1, 1]:
        return Verdict(NEEDED, "the distribution is reused although the structure has changed")
    if made == [1, 1, 2]:
        return Verdict(FIXED, "a changed structure is distributed again")
    return Verdict(UNKNOWN, "expected two saves of the same structure to share one distribution")


def _missing_fields(module: ModuleType) -> list[str]:
    fields = {"ShardedTensor": TENSOR_FIELDS, "ShardedObject": OBJECT_FIELDS}
    return [
        f"field {name} of {kind}"
        for kind, names in fields.items()
        for name in names
        if name not in (find(module, f"{kind}.__dataclass_fields__") or ())
    ]


def _plans_reused(module: ModuleType) -> list[bool]:
    """Return whether the second and the third save reuse a plan.

    Only the rank is provided of torch, as code in which ranks communicate must not run here.
    """
    reused = []

    def plan(tree: Any, *args: Any, cached_ckpt_structure: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        reused.append(any(plan is not None for plan in (cached_ckpt_structure or ())[:2]))
        return (None, None, None), sorted(tree), sorted(tree), len(reused) > 1, False

    stand_ins = {"FileSystemWriterAsync": lambda *args, **kwargs: None, "save_state_dict_async_plan": plan}
    async_save = with_globals(
        module.TorchDistSaveShardedStrategy.async_save,
        mcore_to_pyt_state_dict=lambda tree, *args: tree,
        # It calls megatron.core.utils, which may be half imported: from 0.17 on that imports this module.
        MCoreSavePlanner=lambda *args, **kwargs: None,
        get_async_strategy=lambda *args, **kwargs: ("mcore", stand_ins),
        torch=torch_stand_in(distributed=SimpleNamespace(get_rank=lambda: 1)),
        **stand_ins,
    )
    strategy = answering_none(module.TorchDistSaveShardedStrategy)("torch_dist", 1, cached_metadata=True)
    strategy._get_save_and_finalize_callbacks = lambda *args: None
    for tree in _made_up_trees(module):
        async_save(strategy, tree, "")
    return reused[1:]


def _distributions_after_each_save(module: ModuleType) -> list[int]:
    """Return how many distributions had been made after each save."""
    made: list[int] = []
    distributions: list[str] = []

    def distribute(*args: Any, **kwargs: Any) -> str:
        distributions.append("a distribution")
        return distributions[-1]

    apply = with_globals(
        module.FullyParallelSaveStrategyWrapper.apply_saving_parallelization,
        determine_main_replica_uniform_distribution=distribute,
        distribute_main_replicas_with_precomputed_distribution=lambda *args: None,
        determine_global_metadata=lambda *args: (None, None),
        validate_sharding_integrity=lambda *args: None,
    )
    strategy = SimpleNamespace(backend="torch_dist", version=1)
    wrapper = answering_none(module.FullyParallelSaveStrategyWrapper)(
        strategy, "a group", do_cache_distribution=True
    )
    for tree in _made_up_trees(module):
        apply(wrapper, tree)
        made.append(len(distributions))
    return made


def _made_up_trees(module: ModuleType) -> list[dict[str, Any]]:
    return [{key: module.ShardedObject(key, None, (1,), (0,))} for key in ("same", "same", "another")]


PATCH = Patch(
    name="megatron.save-plan-cache",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/4378",
    sites=(
        Site(
            PLANS_MODULE, diagnose_plans, replace={"TorchDistSaveShardedStrategy.async_save": replan_when_changed}
        ),
        Site(
            DISTRIBUTION_MODULE,
            diagnose_distribution,
            replace={"FullyParallelSaveStrategyWrapper.apply_saving_parallelization": redistribute_when_changed},
        ),
    ),
    changes_numbers=True,
)
