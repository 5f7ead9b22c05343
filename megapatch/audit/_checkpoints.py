"""saved-what-is: a checkpoint that has a model has all of it, as it is now.

Symptom   a parameter is not in a checkpoint, or what a rank has had since the first save is not, as the plan of
          the first save is used again. The save succeeds; a later load fails, or leaves it as it was initialized.
Upstream  NVIDIA/Megatron-LM#4378.
Seam      dist_checkpointing.save() shows which parameters are there: if one that is trained is, all of the chunk
          are. async_save() of the strategy, and the distribution of --ckpt-fully-parallel-save, show whether a
          plan is kept for another structure.
Limits    torch_dist checkpoints. Of parameters that are copied before they are saved, as quantized ones are,
          nothing is known; contents are not compared.
Cost      a look through the state dict in each save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .._mcore.sharded_leaves import FLAG, NVRX, PLANS, leaves, structure
from ..patch import Patch
from ._findings import LEDGER, describe, observes
from ._optimizers import DDPS
from ._sites import site

_SAVED = "_megapatch_saved"
"""Attribute of a strategy: the structure that it saved last, and what NVRx cached then."""


def watch_save(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def patched_save(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        _note_parameters(sharded_state_dict)
        return save(sharded_state_dict, *args, **kwargs)

    return patched_save


@observes
def _note_parameters(tree: Any) -> None:
    # The distributed optimizer's shards of an fp32 model are views of its parameters.
    models = [leaf for leaf in leaves(tree) if "optimizer" not in getattr(leaf, "key", "")]
    saved = {_address(getattr(leaf, "data", None)) for leaf in models}
    for ddp in DDPS:
        trained = [
            parameter
            for parameter in ddp.module.parameters()
            if parameter.requires_grad and not getattr(parameter, "shared_embedding", False)
        ]
        missing = [parameter for parameter in trained if _address(parameter) not in saved]
        if missing and len(missing) < len(trained):
            name = describe(missing, ddp.module.named_parameters())
            LEDGER.report("saved-what-is", "parameters", f"the checkpoint does not have {name}")


def _address(value: Any) -> int:
    return int(value.data_ptr()) if hasattr(value, "data_ptr") else 0


def watch_plan(async_save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(async_save)
    def patched_async_save(self: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        kept = getattr(self, NVRX, None)
        planned = any(getattr(self, name, None) is not None for name in PLANS)
        now = _compare(self, sharded_state_dict, getattr(self, FLAG, False), planned, kept)
        result = async_save(self, sharded_state_dict, *args, **kwargs)
        _note_saved(self, now, getattr(self, NVRX, None))
        return result

    return patched_async_save


def watch_distribution(apply_saving_parallelization: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply_saving_parallelization)
    def patched_apply_saving_parallelization(self: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        distributed = getattr(self, "cached_distribution", None) is not None
        keeps = getattr(self, "do_cache_distribution", False)
        now = _compare(self, sharded_state_dict, keeps, distributed)
        result = apply_saving_parallelization(self, sharded_state_dict, *args, **kwargs)
        _note_saved(self, now, None)
        return result

    return patched_apply_saving_parallelization


@observes
def _note_saved(strategy: Any, structure: list[Any] | None, kept: Any) -> None:
    setattr(strategy, _SAVED, (structure, kept))


@observes
def _compare(strategy: Any, tree: Any, keeps: bool, planned: bool, kept: Any = None) -> list[Any] | None:
    """Return the structure, and report it where the plan that is kept was made for another."""
    now = structure(tree)
    before, then = getattr(strategy, _SAVED, (None, None))
    reused = planned or (kept is not None and kept is then)
    if keeps and reused and before is not None and before != now:
        what = f"a plan is kept for what was saved before: {_difference(before, now)}"
        LEDGER.report("saved-what-is", "structure", what)
    return now


def _difference(before: list[Any], now: list[Any]) -> str:
    changed = [fact[2] for fact in now if fact not in before] or [fact[2] for fact in before if fact not in now]
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"since then {changed[0]}{more} has come, gone or changed" if changed else "the order has changed"


PATCH = Patch(
    name="audit.checkpoints",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/4378",
    sites=(
        site(
            "megatron.core.dist_checkpointing.serialization",
            {"save": watch_save},
            expected={"save": ("sharded_state_dict",)},
        ),
        site(
            "megatron.core.dist_checkpointing.strategies.torch",
            {"TorchDistSaveShardedStrategy.async_save": watch_plan},
            expected={"TorchDistSaveShardedStrategy.async_save": ("sharded_state_dict",)},
        ),
        site(
            "megatron.core.dist_checkpointing.strategies.fully_parallel",
            {"FullyParallelSaveStrategyWrapper.apply_saving_parallelization": watch_distribution},
            expected={
                "FullyParallelSaveStrategyWrapper.apply_saving_parallelization": ("sharded_state_dict",),
            },
        ),
    ),
)
