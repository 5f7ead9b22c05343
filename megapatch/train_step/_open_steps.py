"""The open step of each model chunk, of which a chunk has at most one, whichever TrainStep it belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from ..errors import MisuseError


class OpenStep(Protocol):
    """A `TrainStep`, to code that finds one open: it may end the step, or set it aside for another."""

    @property
    def is_open(self) -> bool: ...

    def finish(self, increment: int | None = None) -> Any: ...

    def reduce(self) -> float: ...

    def abort(self) -> None: ...

    def set_aside(self) -> None: ...

    def take_up(self) -> None: ...


_steps: weakref.WeakKeyDictionary[Any, weakref.ref[OpenStep]] = weakref.WeakKeyDictionary()
"""By chunk; a step that was reduced stays until another one begins.

Once its caller has dropped a step, it keeps neither the model alive nor other steps from it.
"""


def open_step(model: Any) -> OpenStep | None:
    """Return the open `TrainStep` of a model, or None where there is none.

    Args:
        model: as for `TrainStep`: a model, or a list or tuple of chunks, of which the first with an open step
            counts.
    """
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        if (step := _latest(chunk)) is not None and step.is_open:
            return step
    return None


def is_latest(chunks: Iterable[Any], step: OpenStep) -> bool:
    """Return whether no other step of these chunks has begun since this one, which may have been reduced."""
    return all(_latest(chunk) is step for chunk in chunks)


def _latest(chunk: Any) -> OpenStep | None:
    reference = _steps.get(chunk)
    return None if reference is None else reference()


def refuse_while_open(model: Any, what: str) -> None:
    """Refuse an action that would lose or change the gradients of an open step.

    Saving or loading a checkpoint, offloading, and freeing gradient buffers are such actions.

    Args:
        model: as for `TrainStep`: a model, or a list or tuple of chunks.
        what: the action that the caller is about to take, for the message: ``"saving a checkpoint"``.

    Raises:
        MisuseError: a step of the model, or of one of its chunks, is open.
    """
    if open_step(model) is not None:
        raise MisuseError(f"{what} while a TrainStep of this model is open: call its finish() or abort() first")


def take(chunks: Iterable[Any], step: OpenStep) -> None:
    """Record the step as the open one of these chunks."""
    for chunk in chunks:
        _steps[chunk] = weakref.ref(step)


def leave(chunks: Iterable[Any]) -> None:
    """Forget the open step of these chunks."""
    for chunk in chunks:
        _steps.pop(chunk, None)
