"""saved-what-is: a checkpoint that has a model has all of it, as it is now.

Watches   dist_checkpointing.save(), which shows the parameters that are saved: if one that is trained is, all of
          its chunk are, in one save or in several before the next step. async_save() of the strategy, and the
          distribution of --ckpt-fully-parallel-save, which show whether a plan is kept for another structure, so
          that anything that a rank has had since the first save is not saved. In all releases.
Limits    torch_dist checkpoints. A copy of a parameter is known by its name in the state dict; where all that is
          saved of a model are copies, as of quantized parameters, nothing is known here.
Cost      a look through the state dict in each save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .._mcore.sharded_leaves import FLAG, NVRX, PLANS, structure
from ..patch import Site
from ._audit import Audit, Part, Step
from ._contents import address_of, named_weights_in, trained_of
from ._findings import describe, observes, user_code
from ._notes import Notes
from ._sites import site

_PLANS = "TorchDistSaveShardedStrategy.async_save"
_DISTRIBUTION = "FullyParallelSaveStrategyWrapper.apply_saving_parallelization"


class _Missing(NamedTuple):
    """Trained parameters of a chunk that no save has had since its last step, and the user's code then."""

    parameters: list[Any]
    where: tuple[str, ...]


class _Saved(NamedTuple):
    """A strategy's last save: the structure, and NVRx's cache then."""

    structure: list[Any] | None
    kept: Any


class Checkpoints(Part):
    name = "checkpoints"
    doc = __doc__

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._saved: Notes[_Saved] = Notes()
        """About a strategy."""
        self._missing: Notes[_Missing] = Notes()
        """About a chunk, of which a part is saved, until its next step."""

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
        saved = {address_of(tensor): name for name, tensor in named_weights_in(tree)}
        chunks = list(self.audit.models.chunks)
        copies = {_own_name(saved[address]) for address in saved.keys() - _addresses(chunks)}
        for chunk in chunks:
            names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
            trained = trained_of(chunk)
            missing = [parameter for parameter in trained if address_of(parameter) not in saved]
            if len(missing) < len(trained):
                self.ledger.met.add("saved-what-is")
                absent = [parameter for parameter in missing if _own_name(names[id(parameter)]) not in copies]
                self._note_missing(chunk, absent)

    def _note_missing(self, chunk: Any, absent: list[Any]) -> None:
        """Keep what neither this save nor an earlier one before the next step has: a model may have several."""
        before = self._missing.get(chunk, None)
        if before is not None:
            known = {id(parameter) for parameter in before.parameters}
            absent = [parameter for parameter in absent if id(parameter) in known]
        self._missing.set(chunk, _Missing(absent, user_code() if absent else ()))

    @observes
    def begin_step(self, step: Step) -> None:
        """Report parameters that the saves before this step lack."""
        self._report_missing(step.chunks)

    @observes
    def judge(self) -> None:
        """Report parameters that the last saves lack."""
        self._report_missing(self.audit.models.chunks)

    def _report_missing(self, chunks: Iterable[Any]) -> None:
        for chunk in chunks:
            missing = self._missing.pop(chunk, None)
            if missing is not None and missing.parameters:
                name = describe(missing.parameters, chunk.module.named_parameters())
                what = f"the checkpoint does not have {name}"
                self.ledger.report("saved-what-is", "parameters", what, missing.where)

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


def _addresses(chunks: list[Any]) -> set[int]:
    """Return where the parameters of models are, of which all others are copies."""
    return {address_of(parameter) for chunk in chunks for parameter in chunk.module.parameters()}


def _own_name(name: str) -> str:
    """Return a parameter's name without those of the wrappers of its model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
