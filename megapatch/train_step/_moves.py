"""Whether the optimizer has moved since its gradients were reduced: then the step cannot be dropped any more."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ._open_steps import OpenStep
from ._watched_methods import Watch, watch_methods

MOVES = ("step", "step_with_ready_grads", "load_state_dict")
"""Methods of Megatron's optimizers. The first calls the second unless gradients overflow; callers use either.

A chained one calls the second of its parts, of which a later one may raise; a caller may step each part.
"""


def when_moved(step: OpenStep, optimizer: Any, notice: Callable[[], None]) -> Callable[[], Any]:
    """Have a method of the step called once its optimizer has stepped or loaded; return a function that ends that.

    torch has hooks of its own for that, which see steps through a scheduler's wrapper around them, too.
    """
    weak = weakref.WeakMethod(notice)
    if hasattr(optimizer, "register_step_post_hook"):
        remove: Callable[[], Any] = optimizer.register_step_post_hook(lambda *_: _call(weak)).remove
        return remove
    around = functools.partial(_noticed, weak)
    watches = [Watch(optimizer, name, around) for name in MOVES]
    watches += [Watch(part, "step", around) for part in getattr(optimizer, "chained_optimizers", ())]
    return watch_methods(step, watches)


@contextlib.contextmanager
def _noticed(notice: weakref.WeakMethod[Callable[[], None]], *args: Any, **kwargs: Any) -> Iterator[None]:
    yield
    _call(notice)


def _call(notice: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (method := notice()) is not None:
        method()
