"""Gradients are prepared once a step, however often prepare_grads() is called.

Symptom   a caller looks for an overflow with optimizer.prepare_grads(), and then calls optimizer.step(), which
          prepares again: gradients are divided by the loss scale twice. The grad norm reads 0.0, clipping never
          engages, updates nearly vanish, and the dynamic loss scale counts each step twice. slime and miles do
          so wherever the NaN check is off; Megatron's arguments turn it off for fp16 with a dynamic loss scale.
Upstream  unfixed in Megatron 0.12 to 0.19 and on main, and in slime up to 0.3.1: THUDM/slime#1842, #1495.
Seam      class attributes of the optimizers. An optimizer with a loss scale that has prepared its gradients
          returns the earlier result until step(), step_with_ready_grads(), zero_grad() or load_state_dict() ends,
          with or without an exception, or any gradient buffer is zeroed. If preparing raises, it counts as not
          prepared. A chain asks its optimizers, which may have been prepared individually. Without a loss scale
          (bf16, fp32) preparing again does no harm and is left to Megatron.
Limits    zero_grad_buffer() of any DistributedDataParallel ends it for all optimizers of the process: between
          prepare_grads() and step() it makes step() prepare again, as without the patch. Writes to main_grad in
          between go unseen: if you multiply divided gradients by the loss scale again before step(), switch this
          patch off.
          slime's `assert update_successful` is left alone: a step() after a prepare_grads() that found no overflow
          succeeds. slime up to 0.2.4 raises UnboundLocalError (grad_norm) after an overflow; 0.3.0 fixes it,
          slime#1762.
Numbers   change where gradients were prepared twice, to those of a caller that only calls step().
Cost      about 0.2 us in each of these calls, a few a step; nothing in a forward or backward pass.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..._mcore.side_table import SideTable
from ..._python.dotted import find
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, expect_none, running, unmet

MODULE = "megatron.core.optimizer"
MIXED = "optimizer.MixedPrecisionOptimizer"
FLOAT16 = "optimizer.Float16OptimizerWithFloat16Params"
DISTRIBUTED = "distrib_optimizer.DistributedOptimizer"
CHAINED = "optimizer.ChainedOptimizer"
BUFFER = "_ParamAndGradBuffer"
_prepared = SideTable()
"""By optimizer whose gradients are prepared: (`_discards` at that time, whether it overflowed)."""

_discards = 0
"""How often gradients were thrown away; optimizers prepared before the last time count as unprepared."""


def diagnose(module: ModuleType) -> Verdict:
    """Prepare the gradients of a stand-in with the real methods, and again with each call that does so."""
    for owner, _, name in (path.rpartition(".") for path in PATCH.sites[0].replace):
        expect_none(*unmet.attributes(f"{MODULE}:{owner}", name))
    with running("prepare_grads() and step()"):
        counts = _unscale_counts(find(module, "optimizer"))
    if set(counts.values()) == {1}:
        return Verdict(FIXED, "gradients that are prepared are not unscaled again")
    if set(counts.values()) == {2}:
        return Verdict(NEEDED, f"gradients that are prepared are unscaled again by {', '.join(counts)}")
    found = ", ".join(f"{count} with {method}" for method, count in counts.items())
    return Verdict(UNKNOWN, f"expected gradients to be unscaled twice by each of these calls; found {found}")


def prepare_once(prepare_grads: Callable[..., Any]) -> Callable[..., Any]:
    _forget_all()  # marks of an earlier installation may be out of date

    @functools.wraps(prepare_grads)
    def patched_prepare_grads(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = _prepared.get(self)
        if prepared is not None and prepared[0] == _discards:
            return prepared[1]
        found_inf = prepare_grads(self, *args, **kwargs)
        if self.grad_scaler:
            _prepared.set(self, (_discards, found_inf))
        return found_inf

    return patched_prepare_grads


def forget_prepared_after(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make gradients count as unprepared after the method."""

    @functools.wraps(method)
    def patched_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            _forget(self)

    return patched_method


def forget_all_prepared_before(reset: Callable[..., Any]) -> Callable[..., Any]:
    """Make the gradients of all optimizers count as unprepared: a buffer does not know its own."""

    @functools.wraps(reset)
    def patched_reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        _forget_all()
        return reset(self, *args, **kwargs)

    return patched_reset


def _forget_all() -> None:
    global _discards
    _discards += 1


def _forget(optimizer: Any) -> None:
    """Forget it in a chain's children too: step() skips them after an overflow, and may raise in any of them."""
    _prepared.pop(optimizer)
    attributes = optimizer.__dict__
    if "chained_optimizers" in attributes:
        for child in attributes["chained_optimizers"]:
            _forget(child)


def _unscale_counts(optimizer: ModuleType) -> dict[str, int]:
    """Return, by the call made after prepare_grads(), how often both together unscale the gradients."""
    mixed, chained = optimizer.MixedPrecisionOptimizer, optimizer.ChainedOptimizer
    counts = {}
    for owner, method in ((mixed, "prepare_grads"), (mixed, "step"), (chained, "step")):
        unscale = itertools.count(1).__next__  # each is an overflow, after which step() has nothing more to do
        single = StandIn(
            config=StandIn(timers=None),
            grad_scaler=SimpleNamespace(update=lambda found_inf: None),
            _copy_model_grads_to_main_grads=lambda: None,
            _unscale_main_grads_and_check_for_nan=unscale,
        )
        chain = StandIn(chained_optimizers=[single], config=single.config)
        single.prepare_grads = functools.partial(unpatched(mixed.prepare_grads), single)
        chain.prepare_grads = functools.partial(unpatched(chained.prepare_grads), chain)
        single.prepare_grads()
        unpatched(getattr(owner, method))(chain if owner is chained else single)
        counts[f"{owner.__name__}.{method}"] = unscale() - 1
        # Each refers to itself through its method: until the next garbage collection that would hold the original,
        # and have the engine search for its holders.
        del single.prepare_grads, chain.prepare_grads
    return counts


PATCH = Patch(
    name="megatron.prepare-grads-once",
    doc=__doc__,
    upstream="https://github.com/THUDM/slime/pull/1842",
    sites=(
        Site(
            MODULE,
            diagnose,
            replace={
                f"{MIXED}.prepare_grads": prepare_once,
                f"{MIXED}.step": forget_prepared_after,
                f"{MIXED}.step_with_ready_grads": forget_prepared_after,
                f"{CHAINED}.step": forget_prepared_after,
                f"{CHAINED}.step_with_ready_grads": forget_prepared_after,
                f"{FLOAT16}.zero_grad": forget_prepared_after,
                f"{FLOAT16}.load_state_dict": forget_prepared_after,
                f"{DISTRIBUTED}.zero_grad": forget_prepared_after,
                f"{DISTRIBUTED}.load_state_dict": forget_prepared_after,
                f"{BUFFER}.reset": forget_all_prepared_before,
            },
        ),
    ),
    changes_numbers=True,
)
