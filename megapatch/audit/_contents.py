"""saved-is-trained: a checkpoint has the weights that the optimizer steps, as they are when it is written.

Watches   dist_checkpointing.save(): it is given the parameters as the optimizer has stepped them, or copies with
          the same values. And AsyncCallsQueue.schedule_async_request(), which copies the tensors that an
          asynchronous save has planned: the model has made no step in between. In all releases.
Limits    torch_dist checkpoints. Of copies some elements are compared, and only of those in the parameter's own
          type; a model of the same shapes that the audit does not know is taken for one that it knows.
Cost      reads this rank's parameters and main parameters once in a save, and waits for a GPU.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from .._mcore.main_params import has_memory
from .._mcore.sharded_leaves import named_leaves
from ..patch import Site
from ._audit import Audit, Part, Step
from ._findings import describe, observes
from ._kept import Kept
from ._masters import compared_with_mains
from ._samples import sample_of
from ._sites import site


class _Planned:
    """An asynchronous save: its chunks, and whether one of them has been stepped since."""

    def __init__(self, chunks: list[Any]) -> None:
        self.chunks = weakref.WeakSet(chunks)
        self.is_stepped = False


class Contents(Part):
    name = "contents"
    doc = __doc__

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._planned: weakref.WeakKeyDictionary[Any, _Planned] = weakref.WeakKeyDictionary()
        """By a function that finishes an asynchronous save, until its tensors are copied."""

    def sites(self) -> tuple[Site, ...]:
        package = "megatron.core.dist_checkpointing"
        return (
            site(
                f"{package}.serialization", {"save": self.watch_save}, expected={"save": ("sharded_state_dict",)}
            ),
            site(
                f"{package}.strategies.async_utils",
                {"AsyncCallsQueue.schedule_async_request": self.watch_schedule},
            ),
        )

    def watch_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def patched_save(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            chunks = self._look(sharded_state_dict)
            request = save(sharded_state_dict, *args, **kwargs)
            self._note_planned(request, chunks)
            return request

        return patched_save

    # ------------------------------------------------------------------------ what is saved
    @observes
    def _look(self, tree: Any) -> list[Any]:
        """Note weights that are not those that are trained. Return the chunks whose parameters are saved."""
        tensors = weights_in(tree)
        addresses = {address_of(tensor) for tensor in tensors}
        chunks = list(self.audit.models.chunks)
        self.ledger.met.update(["saved-is-trained"] if chunks else [])
        saved = [chunk for chunk in chunks if any(address_of(each) in addresses for each in trained_of(chunk))]
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
            elif self.audit.part(Kept).has_changed(optimizer):
                what = "weights are saved that are not what the optimizer's last step has left, nor loaded since"
                self.ledger.report("saved-is-trained", "optimizer", what)

    def _compare_copies(self, chunks: list[Any], tensors: list[Any]) -> None:
        """Note copies that are a model's by their shapes, and by their values no model's."""
        saved = {_fingerprint(tensor) for tensor in tensors}
        shapes = {fingerprint[0] for fingerprint in saved}
        outdated: list[tuple[Any, list[Any]]] = []
        for chunk in chunks:
            found = {parameter: _fingerprint(parameter) for parameter in trained_of(chunk)}
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
    def _note_planned(self, request: Any, chunks: list[Any] | None) -> None:
        if chunks and getattr(request, "preload_fn", None) is not None:  # else it has copied its tensors
            self._planned[request.finalize_fns[-1]] = _Planned(chunks)

    @observes
    def end_step(self, step: Step) -> None:
        """Note which saves were planned before this step."""
        for planned in self._planned.values():
            planned.is_stepped |= any(chunk in planned.chunks for chunk in step.chunks)

    def watch_schedule(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(schedule)
        def patched_schedule_async_request(queue: Any, async_request: Any, *args: Any, **kwargs: Any) -> Any:
            self._note_scheduled(async_request)
            return schedule(queue, async_request, *args, **kwargs)

        return patched_schedule_async_request

    @observes
    def _note_scheduled(self, request: Any) -> None:
        found = [self._planned.pop(finalize, None) for finalize in request.finalize_fns]
        if any(planned is not None and planned.is_stepped for planned in found):
            what = "an asynchronous save copies its tensors after an optimizer step that came after its plan"
            self.ledger.report("saved-is-trained", "late", what)


# ------------------------------------------------------------------------ weights of a checkpoint
def weights_in(tree: Any) -> list[Any]:
    """Return the tensors in a sharded state dict, without those of optimizers."""
    return [tensor for _, tensor in named_weights_in(tree)]


def named_weights_in(tree: Any) -> list[tuple[str, Any]]:
    """Return the same tensors with their names: a key of the dict that they are in, or "" in a list."""
    # The distributed optimizer's shards of an fp32 model are views of its parameters.
    models = (pair for pair in named_leaves(tree) if "optimizer" not in getattr(pair[1], "key", ""))
    return [(name, leaf.data) for name, leaf in models if hasattr(getattr(leaf, "data", None), "data_ptr")]


def trained_of(chunk: Any) -> list[Any]:
    """Return the parameters of a chunk that a checkpoint has, as they are trained; none if they are offloaded."""
    return [
        parameter
        for parameter in chunk.module.parameters()
        if parameter.requires_grad and not getattr(parameter, "shared_embedding", False)
        if has_memory(parameter)  # else another model is saved
    ]


def address_of(tensor: Any) -> int:
    """Return where a tensor's memory is."""
    return int(tensor.data_ptr())


def _fingerprint(tensor: Any) -> tuple[tuple[Any, ...], bytes]:
    """Return a tensor's shape and type, and some of its elements as bytes."""
    import torch

    (sample,) = sample_of([tensor]).values() or (torch.empty(0),)
    values = bytes(sample.view(torch.uint8).cpu().tolist())
    return (tuple(tensor.shape), tensor.dtype), values
