"""tokens-counted: gradients are divided by the tokens that gave them, and no loss that is NaN is trained on.

Symptom   with calculate_per_token_loss a step made of several calls is divided by the tokens of the last call
          alone, so its gradients are several times too large. Or the loss of a microbatch is NaN (one without
          tokens is 0/0), and the optimizer steps all the same.
Upstream  NVIDIA/Megatron-LM@1aef9f8eff.
Seam      forward_step() of the schedules shows each microbatch's tokens and loss; finalize_model_grads() what
          they are divided by.
Limits    what a trainer divides by itself is not known. Losses are looked at in successful steps only: after an
          fp16 overflow they may be NaN.
Cost      three small operations a microbatch; waits for a GPU in the steps in which ranks are compared.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from .._mcore.bucket_groups import chunks_of
from ..patch import Patch
from ._findings import LEDGER, observes
from ._sites import site

_COUNTED = "_megapatch_tokens"
"""Attribute of a chunk's first gradient buffer: the tokens of the microbatches since it was zeroed."""

_training: list[bool] = []
"""Whether the forward-backward call that is under way trains."""
_not_finite: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""By chunk: how many losses of the step that is being made are NaN or infinite."""


class _Totals:
    """Counts of errors so far: tensors, read in the steps in which ranks are compared."""

    uncounted: Any = 0
    not_finite: Any = 0


# ------------------------------------------------------------------------ what happens
def watch_microbatch(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward_step)
    def patched_forward_step(forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kw: Any) -> Any:
        result = forward_step(forward_step_func, data_iterator, model, *args, **kw)
        if _training and _training[-1]:
            _note_microbatch(model, result)
        return result

    return patched_forward_step


@observes
def _note_microbatch(chunk: Any, result: tuple[Any, Any]) -> None:
    output, num_tokens = result
    for buffer in _buffers(chunk)[:1]:
        setattr(buffer, _COUNTED, getattr(buffer, _COUNTED, 0) + num_tokens)
    loss = output[0] if isinstance(output, list) else output
    if getattr(loss, "ndim", None) == 0:
        _not_finite[chunk] = _not_finite.get(chunk, 0) + ~loss.detach().isfinite()


def begin_call(trains: bool) -> None:
    """Note that a forward-backward call begins."""
    _training.append(trains)


def end_call() -> None:
    """Note that the call has ended."""
    _training.pop()


def watch_finalize(finalize_model_grads: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(finalize_model_grads)
    def patched_finalize_model_grads(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
        if num_tokens is not None:
            _note_normalizer(chunks_of(model) or [], num_tokens)
        return finalize_model_grads(model, num_tokens, *args, **kwargs)

    return patched_finalize_model_grads


@observes
def _note_normalizer(chunks: list[Any], num_tokens: Any) -> None:
    counted = sum(getattr(buffer, _COUNTED, 0) for chunk in chunks for buffer in _buffers(chunk)[:1])
    _Totals.uncounted = _Totals.uncounted + (counted != num_tokens)


def forget(buffer: Any) -> None:
    """Forget the tokens of gradients that were zeroed, or used by an optimizer step."""
    vars(buffer).pop(_COUNTED, None)


# ------------------------------------------------------------------------ what a step finds
@observes
def end_step(chunks: Iterable[Any], succeeded: bool) -> None:
    """Begin another step."""
    for chunk in chunks:
        not_finite = _not_finite.pop(chunk, 0)
        if succeeded:
            _Totals.not_finite = _Totals.not_finite + not_finite
        for buffer in _buffers(chunk)[:1]:
            forget(buffer)


@observes
def judge() -> None:
    """Report what was seen since the last time. Waits for a GPU."""
    uncounted, not_finite = int(_Totals.uncounted), int(_Totals.not_finite)
    _Totals.uncounted = _Totals.not_finite = 0
    if uncounted:
        what = "gradients were divided by another number of tokens than their microbatches had"
        LEDGER.report("tokens-counted", "normalizer", what)
    if not_finite:
        what = f"the optimizer has stepped on {not_finite} microbatches whose loss is NaN or infinite"
        LEDGER.report("tokens-counted", "loss", what)


def _buffers(chunk: Any) -> list[Any]:
    return [*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())]


PATCH = Patch(
    name="audit.tokens",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/commit/1aef9f8eff",
    sites=(
        site(
            "megatron.core.pipeline_parallel.schedules",
            {"forward_step": watch_microbatch},
            expected={"forward_step": ("forward_step_func", "data_iterator", "model")},
        ),
        site(
            "megatron.core.distributed.finalize_model_grads",
            {"finalize_model_grads": watch_finalize},
            expected={"finalize_model_grads": ("model", "num_tokens")},
        ),
    ),
)
