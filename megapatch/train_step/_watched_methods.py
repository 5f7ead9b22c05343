"""Contexts around the methods of an object, for as long as a step needs them.

Nothing is set on the object itself: its copies, and its attributes as they are saved, would have that too. While a
method of some object is watched, the class has a function in its place; afterwards it has its own again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Watch(NamedTuple):
    """A method of an object, and the context that its calls run in; both get the same arguments."""

    owner: Any
    name: str
    around: Callable[..., contextlib.AbstractContextManager[Any]]


_watches: list[Watch] = []
_lock = threading.RLock()  # a step may be dropped, and its watches end, at any time


def watch_methods(step: Any, watches: Iterable[Watch]) -> Callable[[], Any]:
    """Watch methods until the function that is returned is called, or the step is gone.

    A method is left alone unless it is a function of one of the object's classes.
    """
    watches = list(watches)
    with _lock:
        _watches.extend(watches)
        for each in watches:
            _install(each)
    end = weakref.finalize(step, _end, watches)
    end.atexit = False
    return end


def _install(watch: Watch) -> None:
    holder = _holder(watch)
    if holder is not None and _ours_in(vars(holder)[watch.name]) is None:
        setattr(holder, watch.name, _watched(vars(holder)[watch.name], watch.name))


def _end(watches: list[Watch]) -> None:
    with _lock:
        ended = {id(each) for each in watches}
        _watches[:] = [each for each in _watches if id(each) not in ended]
        still = {(_holder(each), each.name) for each in _watches}
        for each in watches:
            holder = _holder(each)
            if holder is not None and (holder, each.name) not in still:
                current = vars(holder)[each.name]
                if _ours_in(current) is current:  # else somebody has wrapped it since, and it stays beneath
                    setattr(holder, each.name, current.__wrapped__)


def _holder(watch: Watch) -> type | None:
    """Return the class that defines the method for the object; None if it is not a function."""
    holder = next((kind for kind in type(watch.owner).__mro__ if watch.name in vars(kind)), None)
    return holder if holder is not None and inspect.isfunction(vars(holder)[watch.name]) else None


def _ours_in(function: Any) -> Any:
    """Return the function of this module that is called by a method, itself included; None if there is none."""
    while function is not None and getattr(function, "__code__", None) is not _CODE:
        function = getattr(function, "__wrapped__", None)
    return function


def _watched(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def watched(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for each in tuple(_watches):
                if each.owner is self and each.name == name:
                    stack.enter_context(each.around(*args, **kwargs))
            return original(self, *args, **kwargs)

    return watched


_CODE = _watched(_watched, "").__code__
