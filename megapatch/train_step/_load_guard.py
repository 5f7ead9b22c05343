"""Loads into an optimizer or a scheduler are refused while a step of theirs is open.

Weights may be loaded: a reference is swapped in for log-probabilities, and back, between the calls of a step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import MisuseError
from ._open_steps import OpenStep

LOAD = "load_state_dict"
OURS = "_megapatch_refuses"
"""Attribute of what is set: a step that its caller has dropped leaves it to the next one."""


def refuse_loads(step: OpenStep, optimizer: Any, scheduler: Any) -> Callable[[], None]:
    """Have load_state_dict() of both raise a MisuseError; return what ends that.

    It ends by itself once the caller has dropped the step, which is not kept alive.
    """
    parts = (optimizer, *getattr(optimizer, "chained_optimizers", ()))
    named = [*((each, "optimizer") for each in parts), (scheduler, "scheduler")]
    guarded = [each for each, what in named if _guard(each, what, weakref.ref(step))]
    return lambda: _end(guarded)


def _guard(each: Any, what: str, step: weakref.ref[OpenStep]) -> bool:
    original = getattr(type(each), LOAD, None)
    attributes = getattr(each, "__dict__", {LOAD: None})
    if original is None or (LOAD in attributes and not hasattr(attributes[LOAD], OURS)):
        return False  # none of torch's or Megatron's, or somebody else has replaced its method
    owner = weakref.ref(each)

    @functools.wraps(original)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        found = step()
        if found is not None and found.is_open:
            raise MisuseError(
                f"load_state_dict() of the {what} while a TrainStep of its model is open: expected none, as the "
                "gradients of its calls belong to the state from before. Nothing was loaded; call the step's "
                "finish() or abort() first"
            )
        return original(owner(), *args, **kwargs)

    setattr(load_state_dict, OURS, True)
    setattr(each, LOAD, load_state_dict)
    return True


def _end(guarded: Iterable[Any]) -> None:
    for each in guarded:
        vars(each).pop(LOAD, None)
