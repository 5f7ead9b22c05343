"""Gather a model's parameters before a function reads them (see `megapatch.weight_sync.gathered_parameters`).

`model_of` takes the call's arguments and returns the model, or a list of model chunks, that the function reads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from types import ModuleType
from typing import Any

from ..patch import ABSENT, FIXED, NEEDED, Verdict, unpatched
from ..weight_sync import gathered_parameters
from ._diagnosis import lacking, reads_in_order

GATHERS = ("start_param_sync", "finish_param_sync", "disable_forward_pre_hook", "gathered_parameters")
"""Names of which one is in the code of a reader that gathers."""


def diagnose_reads(path: str, reads: str, module: ModuleType) -> Verdict:
    """Read the real function, which reads `reads` of a model: running it takes one."""
    name = path.rpartition(".")[2]
    try:
        function = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        return Verdict(ABSENT, f"this version has no {path}()")
    found = reads_in_order(inspect.unwrap(unpatched(function)), reads, *GATHERS)  # of decorators
    if reads not in found:
        return lacking([f"{reads} in {module.__name__}:{path}"])
    if len(set(found)) > 1:
        return Verdict(FIXED, f"{name}() gathers the parameters that it reads")
    return Verdict(NEEDED, f"with overlap_param_gather {name}() reads parameters that are not gathered")


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
