"""Loads into an optimizer or a scheduler are refused while a step of theirs is open.

Weights may be loaded: a reference is swapped in for log-probabilities, and back, between the calls of a step.

A checkpoint is read into the tensors that the optimizer hands out, before load_state_dict() is called. Megatron's
says that it hands them out for that; torch's does not.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import MisuseError
from ._open_steps import OpenStep
from ._watched_methods import Watch, watch_methods

LOADS = ("load_state_dict", "load_parameter_state")
"""Beginnings of the names of methods that load. Megatron's distributed optimizer has eight with the second."""
HAND_OUT = ("sharded_state_dict", "state_dict")
"""Methods that hand out tensors to be loaded into where their `is_loading` is set."""


def refuse_loads(step: OpenStep, optimizer: Any, scheduler: Any) -> Callable[[], Any]:
    """Have loads into both raise a MisuseError; return a function that ends that.

    It ends by itself once the caller has dropped the step, which is not kept alive.
    """
    parts = (optimizer, *getattr(optimizer, "chained_optimizers", ()))
    parts_by_name = [*((part, "optimizer") for part in parts), (scheduler, "scheduler")]
    return watch_methods(
        step,
        [
            Watch(part, name, functools.partial(_refused, f"{name}() of the {what}", takes_flag, part, name))
            for part, what in parts_by_name
            for name, takes_flag in _methods(part.__class__)
        ],
    )


@functools.cache
def _methods(kind: Any) -> list[tuple[str, bool]]:
    """Return the names of methods that load, and whether they do only if `is_loading` is set."""
    loads = [(name, False) for name in dir(kind) if name.startswith(LOADS)]
    found = [(name, getattr(kind, name, None)) for name in HAND_OUT]
    return loads + [
        (name, True) for name, method in found if callable(method) and "is_loading" in _parameters(method)
    ]


def _parameters(method: Any) -> Any:
    return inspect.signature(method).parameters


@contextlib.contextmanager
def _refused(call: str, takes_flag: bool, part: Any, name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    if not takes_flag or _is_loading(getattr(part, name), args, kwargs):
        raise MisuseError(
            f"{call} while a TrainStep of its model is open: expected no load, as the gradients of its calls "
            "belong to the state from before. This call has loaded nothing; call the step's finish() or abort() "
            "first, and load the whole checkpoint then"
        )
    yield


def _is_loading(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        return bool(inspect.signature(method).bind(*args, **kwargs).arguments.get("is_loading"))
    except TypeError:  # the method itself will raise it
        return False
