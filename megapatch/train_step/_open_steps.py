"""Which model chunks have an open step: at most one each, however many TrainSteps are made of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import MisuseError

if TYPE_CHECKING:
    from ._step import TrainStep

_steps: weakref.WeakKeyDictionary[Any, weakref.ref[TrainStep]] = weakref.WeakKeyDictionary()
"""By chunk. A step that its caller has dropped does not keep the model, nor others from it."""


def open_step(model: Any) -> TrainStep | None:
    """The open step of a model, or of one of a list of chunks; None where there is none."""
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        if (reference := _steps.get(chunk)) is not None and (step := reference()) is not None:
            return step
    return None


def refuse_while_open(model: Any, what: str) -> None:
    """Raise MisuseError when a step of the model (or of one of a list of chunks) is open.

    For what would lose or change the gradients that are being accumulated: saving a checkpoint, offloading,
    freeing gradient buffers.
    """
    if open_step(model) is not None:
        raise MisuseError(f"{what} while a TrainStep of this model is open: finish() or abort() it before")


def take(chunks: Iterable[Any], step: TrainStep) -> None:
    for chunk in chunks:
        _steps[chunk] = weakref.ref(step)


def leave(chunks: Iterable[Any]) -> None:
    for chunk in chunks:
        _steps.pop(chunk, None)
