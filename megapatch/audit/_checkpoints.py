"""saved-what-is: a checkpoint that has a model has all of it, as it is now.

Watches   dist_checkpointing.save(), which shows the parameters that are saved: if one that is trained is, all of
          its chunk are. async_save() of the strategy, and the distribution of --ckpt-fully-parallel-save, which
          show whether a plan is kept for another structure, so that anything that a rank has had since the first
          save is not saved. In all releases.
Limits    torch_dist checkpoints. Of parameters that are copied before they are saved, as quantized ones are,
          nothing is known here.
Cost      a look through the state dict in each save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from .._mcore.sharded_leaves import FLAG, NVRX, PLANS, structure
from ..patch import Site
from ._audit import Audit, Part
from ._contents import address_of, trained_of, weights_in
from ._findings import describe, observes
from ._notes import Notes
from ._sites import site

_PLANS = "TorchDistSaveShardedStrategy.async_save"
_DISTRIBUTION = "FullyParallelSaveStrategyWrapper.apply_saving_parallelization"


class _Saved(NamedTuple):
    """A strategy's last save: the structure, and NVRx's cache then."""

    structure: list[Any] | None
    kept: Any


class Checkpoints(Part):
    name = "checkpoints"
    doc = __doc__

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._saved: Notes[_Saved] = Notes("saved")
        """About a strategy."""

    def sites(self) -> tuple[Site, ...]:
        package = "megatron.core.dist_checkpointing"
        return tuple(
            site(f"{package}.{module}", {path: watch}, expected={path: ("sharded_state_dict",)})
            for module, path, watch in (
                ("serialization", "save", self.watch_save),
                ("strategies.torch", _PLANS, self.watch_plan),
                ("strategies.fully_parallel", _DISTRIBUTION, self.watch_distribution),
            )
        )

    # ------------------------------------------------------------------------ parameters
    def watch_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def patched_save(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_parameters(sharded_state_dict)
            return save(sharded_state_dict, *args, **kwargs)

        return patched_save

    @observes
    def _note_parameters(self, tree: Any) -> None:
        self.audit.disturbed("save")
        saved = {address_of(tensor) for tensor in weights_in(tree)}
        for chunk in self.audit.models.chunks:
            trained = trained_of(chunk)
            missing = [parameter for parameter in trained if address_of(parameter) not in saved]
            if missing and len(missing) < len(trained):
                name = describe(missing, chunk.module.named_parameters())
                self.ledger.report("saved-what-is", "parameters", f"the checkpoint does not have {name}")

    # ------------------------------------------------------------------------ plans
    def watch_plan(self, async_save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(async_save)
        def patched_async_save(strategy: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            kept = getattr(strategy, NVRX, None)
            planned = any(getattr(strategy, name, None) is not None for name in PLANS)
            now = self._compare(strategy, sharded_state_dict, getattr(strategy, FLAG, False), planned, kept)
            result = async_save(strategy, sharded_state_dict, *args, **kwargs)
            self._note_saved(strategy, now, getattr(strategy, NVRX, None))
            return result

        return patched_async_save

    def watch_distribution(self, apply_saving_parallelization: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(apply_saving_parallelization)
        def patched_apply_saving_parallelization(
            wrapper: Any, sharded_state_dict: Any, *args: Any, **kwargs: Any
        ) -> Any:
            distributed = getattr(wrapper, "cached_distribution", None) is not None
            keeps = getattr(wrapper, "do_cache_distribution", False)
            now = self._compare(wrapper, sharded_state_dict, keeps, distributed)
            result = apply_saving_parallelization(wrapper, sharded_state_dict, *args, **kwargs)
            self._note_saved(wrapper, now, None)
            return result

        return patched_apply_saving_parallelization

    @observes
    def _note_saved(self, strategy: Any, structure: list[Any] | None, kept: Any) -> None:
        self._saved.set(strategy, _Saved(structure, kept))

    @observes
    def _compare(self, strategy: Any, tree: Any, keeps: bool, planned: bool, kept: Any = None) -> list[Any] | None:
        """Return the structure, and report it where the plan that is kept was made for another."""
        now = structure(tree)
        before, then = self._saved.get(strategy, _Saved(None, None))
        reused = planned or (kept is not None and kept is then)
        if keeps and reused and before is not None and before != now:
            what = f"a plan is kept for what was saved before: {_difference(before, now)}"
            self.ledger.report("saved-what-is", "structure", what)
        return now


def _difference(before: list[Any], now: list[Any]) -> str:
    changed = [fact[2] for fact in now if fact not in before] or [fact[2] for fact in before if fact not in now]
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"since then {changed[0]}{more} has come, gone or changed" if changed else "the order has changed"
