"""saved-what-is, saved-is-trained: a checkpoint has all of a model, as it is trained and as it is now.

Watches   dist_checkpointing.save(). If it has one trained parameter of a chunk, it must have them all, perhaps
          together with other saves before the next step. Values are those of the optimizer's step, or copies.
          async_save() of the strategy, and the distribution of --ckpt-fully-parallel-save: they show a save plan
          reused for another structure, where anything added since the first save is missing.
          AsyncCallsQueue.schedule_async_request(), which copies the tensors that an asynchronous save has planned:
          the model has made no step in between. In all releases.
Limits    torch_dist checkpoints. A copy of a parameter is known by its name in the state dict; where all that is
          saved of a model are copies, as of quantized parameters, it is not known whether they are all. Of copies
          some elements are compared, and only of those in the parameter's own type; a model that the audit does
          not know is taken for one of the same shapes that it knows.
Cost      a look through the state dict in each save, which reads this rank's parameters and main parameters once,
          and waits for a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._mcore.main_params import has_memory
from .._mcore.sharded_leaves import FLAG, NVRX, PLANS, named_leaves, structure
from .._mcore.side_table import SideTable
from ..patch import Site
from ._audit import Audit, Part, Step
from ._findings import describe, observes, user_code
from ._gathered_when_read import GatheredWhenRead
from ._samples import sample_of
from ._step_begins import StepBegins, compared_with_mains
from ._watching import RAISED, around, before, site

_PLANS = "TorchDistSaveShardedStrategy.async_save"
_DISTRIBUTION = "FullyParallelSaveStrategyWrapper.apply_saving_parallelization"


class _Missing(NamedTuple):
    """Trained parameters of a chunk that no save has had since its last step, and the user's code then."""

    parameters: list[Any]
    where: tuple[str, ...]


class _Planned:
    """An asynchronous save: its chunks, and whether one of them has been stepped since."""

    def __init__(self, chunks: list[Any]) -> None:
        self.chunks = weakref.WeakSet(chunks)
        self.is_stepped = False


class Saves(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._saved = SideTable()
        """About a strategy: the structure of its last save, and NVRx's cache then."""
        self._missing = SideTable()
        """About a chunk, of which a part is saved, until its next step."""
        self._planned: weakref.WeakKeyDictionary[Any, _Planned] = weakref.WeakKeyDictionary()
        """By a function that finishes an asynchronous save, until its tensors are copied."""

    def sites(self) -> Iterator[Site]:
        package, tree = "megatron.core.dist_checkpointing", ("sharded_state_dict",)
        for module, path, begin, end in (
            ("serialization", "save", self._begin_save, self._note_planned),
            ("strategies.torch", _PLANS, self._begin_plan, self._note_saved),
            ("strategies.fully_parallel", _DISTRIBUTION, self._begin_distribution, self._note_saved),
        ):
            yield site(f"{package}.{module}", {path: around(begin, end)}, expected={path: tree})
        scheduled = {"AsyncCallsQueue.schedule_async_request": before(self._note_scheduled)}
        yield site(f"{package}.strategies.async_utils", scheduled)

    def _begin_save(self, sharded_state_dict: Any, *_: Any, **__: Any) -> Any:
        """Return the chunks whose parameters are saved."""
        self._note_parameters(sharded_state_dict)
        return self._look(sharded_state_dict)

    # ------------------------------------------------------------------------ whether all is saved
    @observes
    def _note_parameters(self, tree: Any) -> None:
        self.audit.disturbed("save")
        saved = {tensor.data_ptr(): name for name, tensor in _named_weights_in(tree)}
        chunks = list(self.audit.models.chunks)
        originals = {parameter.data_ptr() for chunk in chunks for parameter in chunk.module.parameters()}
        copies = {_own_name(saved[address]) for address in saved.keys() - originals}
        for chunk in chunks:
            names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
            trained = _trained_of(chunk)
            missing = [parameter for parameter in trained if parameter.data_ptr() not in saved]
            if len(missing) < len(trained):
                self.ledger.judged["saved-what-is saves"] += 1
                absent = [parameter for parameter in missing if _own_name(names[id(parameter)]) not in copies]
                self._note_missing(chunk, absent)

    def _note_missing(self, chunk: Any, absent: list[Any]) -> None:
        """Keep what neither this save nor an earlier one before the next step has: a model may have several."""
        before = self._missing.get(chunk, None)
        if before is not None:
            known = {id(parameter) for parameter in before.parameters}
            absent = [parameter for parameter in absent if id(parameter) in known]
        self._missing.set(chunk, _Missing(absent, user_code() if absent else ()))

    def begin_step(self, step: Step) -> None:
        """Report parameters that the saves before this step lack."""
        self._report_missing(step.chunks)

    def end_step(self, step: Step) -> None:
        """Note which saves were planned before this step."""
        for planned in self._planned.values():
            planned.is_stepped |= any(chunk in planned.chunks for chunk in step.chunks)

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

    # ------------------------------------------------------------------------ whether it is what is trained
    @observes
    def _look(self, tree: Any) -> list[Any]:
        """Note weights that are not those that are trained. Return the chunks whose parameters are saved."""
        tensors = [tensor for _, tensor in _named_weights_in(tree)]
        self.audit.part(GatheredWhenRead).look_at_saved("dist_checkpointing.save()", tensors)
        addresses = {tensor.data_ptr() for tensor in tensors}
        chunks = list(self.audit.models.chunks)
        self.ledger.judged["saved-is-trained"] += bool(chunks)
        saved = [chunk for chunk in chunks if any(each.data_ptr() in addresses for each in _trained_of(chunk))]
        for chunk in saved:
            self._compare_with_optimizer(chunk)
        if not saved and all(map(has_memory, (each for chunk in chunks for each in chunk.module.parameters()))):
            self._compare_copies(chunks, tensors)
        return saved

    def _compare_with_optimizer(self, chunk: Any) -> None:
        own = {id(parameter) for parameter in chunk.module.parameters()}
        for optimizer in self.audit.models.optimizers_of(chunk):
            parameters, differ = compared_with_mains(optimizer)
            flags = differ.tolist() if parameters else ()
            wrong = [each for each, differs in zip(parameters, flags, strict=True) if differs and id(each) in own]
            if wrong:
                name = describe(wrong, chunk.module.named_parameters())
                what = f"{name} is saved, and is not what the optimizer's main parameter says"
                self.ledger.report("saved-is-trained", "optimizer", what)
            elif self.audit.part(StepBegins).has_changed(optimizer):
                what = "weights are saved that are not what the optimizer's last step has left, nor loaded since"
                self.ledger.report("saved-is-trained", "optimizer", what)

    def _compare_copies(self, chunks: list[Any], tensors: list[Any]) -> None:
        """Note copies that are a model's by their shapes, and by their values no model's."""
        saved = {_fingerprint(tensor) for tensor in tensors}
        shapes = {fingerprint[0] for fingerprint in saved}
        outdated: list[tuple[Any, list[Any]]] = []
        for chunk in chunks:
            found = {parameter: _fingerprint(parameter) for parameter in _trained_of(chunk)}
            if not found or not {shape for shape, _ in found.values()} <= shapes:
                continue
            wrong = [parameter for parameter, fingerprint in found.items() if fingerprint not in saved]
            if not wrong:
                return
            outdated.append((chunk, wrong))
        for chunk, wrong in outdated[:1]:
            name = describe(wrong, chunk.module.named_parameters())
            what = f"copies are saved that do not have the values of {name}"
            self.ledger.report("saved-is-trained", "copies", what)

    # ------------------------------------------------------------------------ when it is written
    @observes
    def _note_planned(self, chunks: list[Any] | None, request: Any, *_: Any, **__: Any) -> None:
        if chunks and getattr(request, "preload_fn", None) is not None:  # else it has copied its tensors
            self._planned[request.finalize_fns[-1]] = _Planned(chunks)

    @observes
    def _note_scheduled(self, queue: Any, async_request: Any, *_: Any, **__: Any) -> None:
        found = [self._planned.pop(finalize, None) for finalize in async_request.finalize_fns]
        if any(planned is not None and planned.is_stepped for planned in found):
            what = "an asynchronous save copies its tensors after an optimizer step that came after its plan"
            self.ledger.report("saved-is-trained", "late", what)

    # ------------------------------------------------------------------------ plans
    def _begin_plan(self, strategy: Any, sharded_state_dict: Any, *_: Any, **__: Any) -> Any:
        kept = getattr(strategy, NVRX, None)
        planned = any(getattr(strategy, name, None) is not None for name in PLANS)
        return self._compare(strategy, sharded_state_dict, getattr(strategy, FLAG, False), planned, kept)

    def _begin_distribution(self, wrapper: Any, sharded_state_dict: Any, *_: Any, **__: Any) -> Any:
        distributed = getattr(wrapper, "cached_distribution", None) is not None
        keeps = getattr(wrapper, "do_cache_distribution", False)
        return self._compare(wrapper, sharded_state_dict, keeps, distributed)

    @observes
    def _note_saved(self, structure: list[Any] | None, result: Any, strategy: Any, *_: Any, **__: Any) -> None:
        if result is not RAISED:
            self._saved.set(strategy, (structure, getattr(strategy, NVRX, None)))

    @observes
    def _compare(self, strategy: Any, tree: Any, keeps: bool, planned: bool, kept: Any = None) -> list[Any] | None:
        """Return the structure, and report it where the plan that is kept was made for another."""
        now = structure(tree)
        before, then = self._saved.get(strategy, (None, None))
        reused = planned or (kept is not None and kept is then)
        is_judged = keeps and reused and before is not None
        self.ledger.judged["saved-what-is plans"] += is_judged
        if is_judged and before != now:
            what = f"a plan is kept for what was saved before: {_difference(before, now)}"
            self.ledger.report("saved-what-is", "structure", what)
        return now


def _difference(before: list[Any], now: list[Any]) -> str:
    changed = [fact[2] for fact in now if fact not in before] or [fact[2] for fact in before if fact not in now]
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"since then {changed[0]}{more} has come, gone or changed" if changed else "the order has changed"


def _own_name(name: str) -> str:
    """Return a parameter's name without those of the wrappers of its model."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


# ------------------------------------------------------------------------ weights of a checkpoint
def _named_weights_in(tree: Any) -> list[tuple[str, Any]]:
    """Return the tensors in a sharded state dict but those of optimizers, each with its key, or "" in a list."""
    # The distributed optimizer's shards of an fp32 model are views of its parameters.
    models = (pair for pair in named_leaves(tree) if "optimizer" not in getattr(pair[1], "key", ""))
    return [(name, leaf.data) for name, leaf in models if hasattr(getattr(leaf, "data", None), "data_ptr")]


def _trained_of(chunk: Any) -> list[Any]:
    """Return the parameters of a chunk that a checkpoint has, as they are trained; none if they are offloaded."""
    return [
        parameter
        for parameter in chunk.module.parameters()
        if parameter.requires_grad and not getattr(parameter, "shared_embedding", False)
        if has_memory(parameter)  # else another model is saved
    ]


def _fingerprint(tensor: Any) -> tuple[tuple[Any, ...], bytes]:
    """Return a tensor's shape and type, and some of its elements as bytes."""
    import torch

    (sample,) = sample_of([tensor]).values() or (torch.empty(0),)
    values = bytes(sample.view(torch.uint8).cpu().tolist())
    return (tuple(tensor.shape), tensor.dtype), values
