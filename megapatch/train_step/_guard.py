"""The guard of a step: watches over its model, optimizer and scheduler while it is open, or reduced.

An open step owns its gradients: nobody else steps the optimizer or zeroes gradients, and nothing is loaded into
the optimizer or the scheduler. Weights may be loaded: a reference is swapped in for log-probabilities, and back,
between the calls of a step. A checkpoint is read into the tensors that the optimizer hands out, before
load_state_dict() is called; Megatron's optimizer says that it hands them out for that.

A reduced step notices that its optimizer has moved: then it cannot be dropped any more.

Nothing is set on the objects themselves: their copies, and their attributes as they are saved, would have that
too. While a method of an object is watched, the class has a function in its place, and afterwards its own again.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .._python.layers import HOLDER
from .._python.places import user_line
from ..errors import MisuseError

MOVES = ("step", "step_with_ready_grads")
"""Methods of Megatron's optimizers. The first calls the second unless gradients overflow; callers use either.

A chained one calls the second of its parts, of which a later one may raise; a caller may step each part.
"""
LOADS = ("load_state_dict", "load_parameter_state")
"""Beginnings of the names of methods that load. Megatron's distributed optimizer has eight with the second."""
HAND_OUT = ("sharded_state_dict", "state_dict")
"""Methods that hand out tensors to be loaded into where their `is_loading` is set."""

_NO_LOAD = (
    "expected no load, as the gradients of its calls belong to the state from before. This call has loaded "
    "nothing; call the step's finish() or abort() first, and load the whole checkpoint then"
)
_NO_MOVE = (
    "the step owns its gradients, which are not reduced yet. This call has done nothing; the step's finish() "
    "steps the optimizer, its abort() zeroes gradients, and after its reduce() both are yours to do"
)


class Watch(NamedTuple):
    """A method of an object, what is called before it with the same arguments, and after it, if it returns."""

    owner: Any
    name: str
    before: Callable[..., object] = lambda *args, **kwargs: None
    after: Callable[[], object] = lambda: None


_guards: list[Guard] = []
"""Those that watch something."""
_lock = threading.RLock()  # a step may be dropped, and its watches end, at any time


class Guard:
    """The watches of a step, until `stop`, or until its caller has dropped the step, which is not kept alive.

    Any method may be interrupted, and called again.

    Attributes:
        is_lifted: whether the step itself is at work, and nothing is refused.
    """

    def __init__(self, step: Any) -> None:
        self.is_lifted, self.watches = False, list[Watch]()
        self._since = ""
        end = weakref.finalize(step, self.stop)
        end.atexit = False

    def refuse(self, chunks: Iterable[Any], optimizer: Any, scheduler: Any) -> None:
        """Have loads into optimizer and scheduler, and steps and zeroing by others, raise MisuseError."""
        self._since = user_line()
        watches = [self._refusal(chunk, "the model", "zero_grad_buffer", _NO_MOVE) for chunk in chunks]
        for part in _parts(optimizer):
            watches += [self._refusal(part, "the optimizer", name, _NO_MOVE) for name in ("zero_grad", *MOVES)]
        for part, what in [*((part, "the optimizer") for part in _parts(optimizer)), (scheduler, "the scheduler")]:
            for name, takes_flag in _loads(part.__class__):
                watches.append(self._refusal(part, what, name, _NO_LOAD, takes_flag))
        self._watch(watches)

    def notice_moves(self, optimizer: Any, notice: Callable[[], None]) -> None:
        """Have a method of the step called once its optimizer has stepped or loaded."""
        weak = weakref.WeakMethod(notice)

        def moved() -> None:
            if (method := weak()) is not None:
                method()

        watches = [Watch(optimizer, name, after=moved) for name in (*MOVES, "load_state_dict")]
        self._watch(watches + [Watch(part, "step", after=moved) for part in _parts(optimizer)[1:]])

    def stop(self) -> None:
        """End all watches."""
        with _lock:
            others = [each for guard in _guards if guard is not self for each in guard.watches]
            still = {(_holder(each), each.name) for each in others}
            for each in self.watches:
                holder = _holder(each)
                if holder is not None and (holder, each.name) not in still:
                    current = vars(holder)[each.name]
                    if _ours_in(current) is current:  # else somebody has wrapped it since, and it stays beneath
                        setattr(holder, each.name, current.__wrapped__)
            self.watches = []
            _guards[:] = [guard for guard in _guards if guard is not self]

    def _watch(self, watches: list[Watch]) -> None:
        with _lock:
            self.watches = watches  # first, so that `stop` takes away what an interruption has left
            _guards.append(self)
            for each in watches:
                holder = _holder(each)
                if holder is not None and _ours_in(vars(holder)[each.name]) is None:
                    function = _watched(vars(holder)[each.name], each.name)
                    vars(function)[HOLDER] = f"the guard of a TrainStep, open since {self._since},"
                    setattr(holder, each.name, function)

    def _refusal(self, part: Any, what: str, name: str, why: str, takes_flag: bool = False) -> Watch:
        def before(*args: Any, **kwargs: Any) -> None:
            if not takes_flag or _is_loading(getattr(part, name), args, kwargs):
                self._refuse(f"{name}() of {what}", why)

        return Watch(part, name, before)

    def _refuse(self, call: str, why: str) -> None:
        if not self.is_lifted:
            raise MisuseError(
                f"{call} while a TrainStep of its model is open: {why} "
                f"(it is open since {self._since}; this call is at {user_line()})"
            )


def _parts(optimizer: Any) -> list[Any]:
    return [optimizer, *getattr(optimizer, "chained_optimizers", ())]


@functools.cache
def _loads(kind: Any) -> list[tuple[str, bool]]:
    """Return the names of methods that load, and whether they do only if `is_loading` is set."""
    loads = [(name, False) for name in dir(kind) if name.startswith(LOADS)]
    found = [(name, getattr(kind, name, None)) for name in HAND_OUT]
    return loads + [
        (name, True)
        for name, method in found
        if callable(method) and "is_loading" in inspect.signature(method).parameters
    ]


def _is_loading(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        return bool(inspect.signature(method).bind(*args, **kwargs).arguments.get("is_loading"))
    except TypeError:  # the method itself will raise it
        return False


# ---------------------------------------------------------------------------- functions in place of methods
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
        watches = [each for guard in tuple(_guards) for each in guard.watches]
        concerned = [each for each in watches if each.owner is self and each.name == name]
        for each in concerned:
            each.before(*args, **kwargs)
        result = original(self, *args, **kwargs)
        for each in concerned:
            each.after()
        return result

    return watched


_CODE = _watched(_watched, "").__code__
