"""scaled-once and unscaled-once: the loss is multiplied by the loss scale, and gradients are divided by it, once.

Watches   the mixed-precision optimizer, in all releases. Counts, between zeroing and step, calls of
          get_loss_scale(), as scale_loss() makes one, and divisions of gradients. And the hooks of the config, as
          a forward-backward call begins, which show the scale of auxiliary losses.
          Where nobody asked, what a step's first loss was multiplied by, and what the hook makes of 1: a trainer
          may read `optimizer.grad_scaler.scale`, a property.
Limits    a scale that was asked for is taken for applied, though a trainer may only have logged it. One that is
          read as a property, and applied to gradients by a hook, is not seen: call get_loss_scale() there.
Cost      no sync unless nobody asked for the scale.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

from ..patch import Site
from ._audit import Audit, Call, Part, Step
from ._chunks import grad_buffers, has_router_losses, numbers_of
from ._findings import observes
from ._watching import RAISED, after, around, site

_MOST_NODES = 32
_OF_TOKENS = ("Mul", "Div", "ToCopy", "View", "Transpose", "Clone")
"""The arithmetic of losses of tokens; below it are activations, which may be offloaded."""


class ScaledOnce(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._asked: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """By optimizer: the loss scale that was asked for since its last step."""
        self._asked_for: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks for which anybody has asked for the loss scale of an optimizer since their last step."""
        self._multiplied_by: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        """By chunk: what the first loss since its last step was multiplied by, if nobody had asked by then."""
        self._divided: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        """By optimizer: the gradients as they were once it had divided them."""
        self._unscaled_losses: weakref.WeakSet[Any] = weakref.WeakSet()
        """Chunks whose auxiliary losses were not multiplied by any scale since the last step."""

    def sites(self) -> Iterator[Site]:
        asked, divided = after(self._note_ask), around(self._before_division, self._after_division)
        divide = "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan"
        watched = {"MixedPrecisionOptimizer.get_loss_scale": asked, divide: divided}
        yield site("megatron.core.optimizer.optimizer", watched)

    # ------------------------------------------------------------------------ events
    @observes
    def _note_ask(self, scale: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        self._asked[optimizer] = scale
        self._asked_for.update(self.audit.models.stepped_by(optimizer))

    @observes
    def _before_division(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.ledger.judged["unscaled-once"] += 1
        again = self._divided.get(optimizer) == self._gradients_now(optimizer) and self._divides_buffers(optimizer)
        if again and float(optimizer.grad_scaler.scale) != 1:
            self.ledger.report("unscaled-once", "again", "gradients were divided by the loss scale again")
        self._compare_scales(optimizer)

    @observes
    def _after_division(self, _: None, result: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        if result is not RAISED:
            self._divided[optimizer] = self._gradients_now(optimizer)

    def _gradients_now(self, optimizer: Any) -> list[int]:
        """Return numbers that change whenever a gradient arrives, or a buffer is changed in place or zeroed."""
        return [self.audit.resets, *numbers_of(self.audit.models.stepped_by(optimizer))]

    def _compare_scales(self, optimizer: Any) -> None:
        """Report a scale that changed after the loss was multiplied by it. (It changes by being replaced.)"""
        asked, scale = self._asked.get(optimizer), optimizer.grad_scaler.scale
        if asked is not None and asked is not scale and float(asked) != float(scale):
            what = f"the loss was scaled by {float(asked):g}, and its gradients are divided by {float(scale):g}"
            self.ledger.report("scaled-once", "changed", what)

    def _divides_buffers(self, optimizer: Any) -> bool:
        """Return whether the gradients that are divided are the model's own, rather than copies for this step."""

        def storage(tensor: Any) -> int:
            return int(tensor.untyped_storage().data_ptr())

        buffers = {storage(each.grad_data) for each in grad_buffers(self.audit.models.stepped_by(optimizer))}
        divided = [] if optimizer.is_stub_optimizer else optimizer._collect_main_grad_data_for_unscaling()
        return any(storage(grad) in buffers for grad in divided)

    def begin_call(self, call: Call) -> None:
        """Note a call that will not multiply auxiliary losses by any scale."""
        config = call.chunks[0].config
        if call.trains and _has_other_losses(config):
            self.ledger.judged["scaled-once calls"] += 1
            if config.grad_scale_func is None and _has_unscaled_losses(config):
                self._unscaled_losses.update(call.chunks)

    def trained_on(self, chunk: Any, loss: Any, num_tokens: Any) -> None:
        """Note what a loss was multiplied by."""
        if chunk.config.fp16 and not (chunk in self._multiplied_by or chunk in self._asked_for):
            self._multiplied_by[chunk] = _factors_of_loss(loss)

    def _is_multiplied(self, chunks: list[Any], scale: Any) -> bool:
        """Return whether a loss was multiplied by the scale though nobody asked for it. Waits for the GPU."""
        factors = [factor for chunk in chunks for factor in self._multiplied_by.get(chunk, ())]
        hooks = [chunk.config.grad_scale_func for chunk in chunks if chunk.config.grad_scale_func is not None]
        factors += [hook(scale.new_ones(1)) for hook in hooks]  # as Megatron asks it for routers
        return float(scale) in (1.0, *map(float, factors))

    # ------------------------------------------------------------------------ judged in the step
    def begin_step(self, step: Step) -> None:
        """Judge the scales of the losses."""
        scaled = [part for part in step.optimizers if getattr(part, "grad_scaler", None) is not None]
        if not scaled or not step.has_gradients:
            return
        self.ledger.judged["scaled-once steps"] += 1
        scale, asked = scaled[0].grad_scaler.scale, any(chunk in self._asked_for for chunk in step.chunks)
        if not asked and _is_last_stage() and not self._is_multiplied(step.chunks, scale):
            what = "the optimizer divides by a loss scale that nobody multiplied the loss by"
            self.ledger.report("scaled-once", "loss", what)
        if any(chunk in self._unscaled_losses for chunk in step.chunks) and float(scale) != 1:
            what = "auxiliary losses are not multiplied by the loss scale that the optimizer divides by"
            self.ledger.report("scaled-once", "auxiliary", what)

    def end_step(self, step: Step) -> None:
        """Forget requests for the scale, for the next step."""
        for part in step.optimizers:
            self._asked.pop(part, None)
        for chunk in step.chunks:
            self._multiplied_by.pop(chunk, None)
        self._asked_for.difference_update(step.chunks)
        self._unscaled_losses.difference_update(step.chunks)


def _has_other_losses(config: Any) -> bool:
    return has_router_losses(config) or bool(getattr(config, "mtp_num_layers", None))


def _has_unscaled_losses(config: Any) -> bool:
    routers = has_router_losses(config) and not getattr(config, "moe_grad_scale_func", None)
    predictions = getattr(config, "mtp_num_layers", None) and not getattr(config, "mtp_grad_scale_func", None)
    return routers or bool(predictions)


def _is_last_stage() -> bool:
    from megatron.core import parallel_state

    stages: int = parallel_state.get_pipeline_model_parallel_world_size()
    return bool(parallel_state.get_pipeline_model_parallel_rank() == stages - 1)


# ------------------------------------------------------------------------ the numbers that a loss is multiplied by
def _factors_of_loss(loss: Any) -> list[Any]:
    """Return the tensors of one element that a loss, or those of its tokens, was multiplied by. Waits for nothing.

    They are found in autograd's graph, by private names that torch 2.5 to 2.15 have; without these, none is.
    """
    found: list[Any] = []
    seen: set[Any] = set()
    todo = [getattr(loss, "grad_fn", None)]
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        if node is None or node in seen or not _is_of_loss(node):
            continue
        seen.add(node)
        if type(node).__name__ == "MulBackward0":
            saved = (getattr(node, name, None) for name in ("_saved_self", "_saved_other"))
            factors = (factor for factor in saved if factor is not None and factor.numel() == 1)
            found += [factor for factor in factors if not factor.requires_grad]
        todo += [below for below, _ in node.next_functions]
    return found


def _is_of_loss(node: Any) -> bool:
    if type(node).__name__.removesuffix("Backward0") in _OF_TOKENS:
        return True
    results = getattr(node, "_input_metadata", None)
    return results is not None and all(math.prod(result.shape) == 1 for result in results)
