"""Gather a model's parameters before a function reads them (see `megapatch.weight_sync.gathered_parameters`).

`model_of` takes the call's arguments and returns the model, or a list of model chunks, that the function reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

from ..weight_sync import gathered_parameters


def gathered_before_call(reader: Callable[..., Any], model_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, with the parameters gathered before it begins. All ranks have to call it."""

    @functools.wraps(reader)
    def patched_reader(*args: Any, **kwargs: Any) -> Any:
        gathered_parameters(model_of(*args, **kwargs))
        return reader(*args, **kwargs)

    return patched_reader


def gathered_at_first_next(stream: Callable[..., Any], model_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, whose generator gathers at its first `next`, and before it reads the first tensor.

    It may have been made before the optimizer step. The function itself is called at once: one that is not a
    generator function may check its arguments, and open files, before it returns its generator.
    """

    @functools.wraps(stream)
    def patched_stream(*args: Any, **kwargs: Any) -> Any:
        return _gathered_first(stream(*args, **kwargs), lambda: model_of(*args, **kwargs))

    return patched_stream


def _gathered_first(tensors: Iterator[Any], model: Callable[[], Any]) -> Generator[Any, Any, Any]:
    gathered_parameters(model())
    return (yield from tensors)
