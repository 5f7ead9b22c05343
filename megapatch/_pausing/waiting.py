"""Wait for the result of a call, of any kind: one rule for pauses, resumes, weight syncs and a pump's calls.

awaitable                            awaited, then its result is looked at; Ray's ObjectRef is one
`concurrent.futures.Future`          likewise, as of an executor or of `asyncio.run_coroutine_threadsafe`
list, tuple, set or dictionary       each of its values, all of them even when one fails
generator, function, a handle        MisuseError: nothing in the first two has run, and nobody knows how to
                                     wait for the third (torch's Work, a thread, a process, a pool's AsyncResult)
anything else                        is a result
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import MegapatchError, MisuseError
from .cancellation import is_remote, tell_besides, wait_to_end

if TYPE_CHECKING:
    import asyncio

Call = Callable[..., object]
Outcome = tuple["Exception | None", "BaseException | None"]
_T = TypeVar("_T")

_NOT_BEGUN = (
    *(Generator, AsyncGenerator, map, filter, zip),
    *(FunctionType, BuiltinFunctionType, MethodType, functools.partial),
    *(contextlib._GeneratorContextManager, contextlib._AsyncGeneratorContextManager),
)
_ENDED = ("done", "ready", "poll", "is_alive", "is_completed")
_WAITS = ("wait", "result", "join")
"""A handle of work that is under way has a method of each kind."""


def begin(call: Call) -> object:
    """Call it, and return its result, which may be something to wait for."""
    return call.remote() if is_remote(call) else call()  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------ what is under way
def is_under_way(result: object) -> bool:
    """Return whether a result is one thing to wait for: an awaitable or a concurrent future."""
    return inspect.isawaitable(result) or _is_concurrent(type(result))


def _is_concurrent(kind: type) -> bool:
    futures = sys.modules.get("concurrent.futures._base")  # where it is not loaded nobody has one
    return futures is not None and issubclass(kind, futures.Future)


def _parts(result: object) -> list[Any]:
    """Return the values of a container of Python's own; reading another one may do anything."""
    if isinstance(result, (list, tuple, set, frozenset)):
        return list(result)
    return list(dict.values(result)) if isinstance(result, dict) else []


def _unwaitable(kind: type) -> str | None:
    """Say what is wrong with an object of this type, if it stands for work that cannot be waited for.

    Looks at the type, because a mock has every attribute.
    """
    if issubclass(kind, _NOT_BEGUN):
        return f"a {kind.__name__}, in which nothing has run"
    if all(any(callable(getattr(kind, name, None)) for name in names) for names in (_ENDED, _WAITS)):
        return f"a {kind.__name__}, which may be under way"
    return None


async def top_of(result: Any) -> Any:
    """Wait for a result itself, not for its contents: it may be data."""
    while is_under_way(result):
        if _is_concurrent(type(result)):
            import asyncio

            result = asyncio.wrap_future(result)
        result = await result
    return result


async def finished(result: Any, what: str = "the call") -> Any:
    """Return a result when nothing in it is under way any more; see the top of this module.

    Args:
        result: of a call that does something, rather than of one that returns data.
        what: the call, in messages.

    Raises:
        MisuseError: it stands for work that cannot be waited for.
        Exception: the first failure, when all else has ended, too. The others are logged.
    """
    return await _finished(result, what, set())


async def _finished(result: Any, what: str, above: set[int]) -> Any:
    result = await top_of(result)
    if (wrong := _unwaitable(type(result))) is not None:
        raise MisuseError(f"{what} returned {wrong}: let it wait until that is done, or be a coroutine function")
    parts = _parts(result)
    if id(result) in above or not any(map(_may_be_under_way, set(map(type, parts)))):
        return result
    import asyncio

    waits = (_finished(part, what, {*above, id(result)}) for part in parts)
    found = await asyncio.gather(*waits, return_exceptions=True)
    _raise_first(what, found)
    if isinstance(result, dict):
        return dict(zip(result, found, strict=True))
    return tuple(found) if isinstance(result, tuple) else found


def _may_be_under_way(kind: type) -> bool:
    containers = (list, tuple, set, frozenset, dict)
    return (
        issubclass(kind, (GeneratorType, *containers))
        or hasattr(kind, "__await__")
        or _is_concurrent(kind)
        or _unwaitable(kind) is not None
    )


def _raise_first(what: str, found: Sequence[Any]) -> None:
    failures = [as_failure(what, other) for other in found if isinstance(other, BaseException)]
    if not failures:
        return
    first = next((failure for failure in failures if isinstance(failure, MisuseError)), failures[0])
    for other in failures:
        if other is not first:
            tell_besides(f"{what} failed in another way, too", other, first, "another-way")
    if len(failures) == len(found) or isinstance(first, MisuseError):
        raise first
    # Not simply that failure: what has succeeded may have to be undone.
    text = f"{len(failures)} of {len(found)} parts of {what} failed: {type(first).__name__}: {first}"
    raise MegapatchError(text) from first


def as_failure(what: str, error: BaseException) -> BaseException:
    """Return the failure of a call that ended with this error, in which a CancelledError is not the caller's."""
    import asyncio

    if not isinstance(error, asyncio.CancelledError):
        return error
    failure = _cancelled(what)
    failure.__cause__ = error
    return failure


# ------------------------------------------------------------------------------------------ in an event loop
async def attempt(call: Call, what: str, interruptible: bool = False) -> Outcome:
    """Make a call and wait until it is done. Return its failure, and the first cancellation that arrived.

    Args:
        what: the call, in messages.
        interruptible: whether a cancellation reaches the call. It is done then, too, when this returns.
    """
    import asyncio  # here, as `import megapatch` must not import it

    try:
        result = begin(call)
    except (Exception, asyncio.CancelledError) as error:
        return ordinary(as_failure(what, error)), None
    if isinstance(result, (type(None), bool)):
        return None, None
    task, cancelled = await _wait_to_end(finished(result, what), result, interruptible)
    return ordinary(_failure_of(task, what)), cancelled


async def _wait_to_end(
    coroutine: Coroutine[Any, Any, _T], result: Any, interruptible: bool
) -> tuple[asyncio.Task[_T], BaseException | None]:
    """Run a coroutine that waits for a result in a task, to its end; return that, and the first cancellation."""
    import asyncio

    task = asyncio.ensure_future(coroutine)
    cancelled = await wait_to_end(task, interruptible)
    if inspect.iscoroutine(result) and inspect.getcoroutinestate(result) == inspect.CORO_CREATED:
        result.close()  # all tasks of the loop were cancelled, this one before it had begun
    return task, cancelled


def _failure_of(task: asyncio.Task[Any], what: str) -> BaseException | None:
    return _cancelled(what) if task.cancelled() else task.exception()


def _cancelled(what: str) -> MegapatchError:
    """Return the exception to raise in place of a CancelledError that did not come from the caller.

    asyncio takes that for the end of a task that somebody has cancelled: a TaskGroup drops it.
    """
    return MegapatchError(f"{what} was cancelled before it was done")


def ordinary(error: BaseException | None) -> Exception | None:
    """Return an ordinary exception; raise others, such as SystemExit."""
    if error is None or isinstance(error, Exception):
        return error
    raise error


async def result_of(result: Any, what: str, data: bool = False) -> Any:
    """Wait for the result of a call, and return it. A cancellation reaches the call.

    Args:
        what: the call, in messages.
        data: whether the call returns data; objects in it are not waited for.

    Raises:
        MegapatchError: the call was cancelled, and not by its caller.
    """

    if result is None or (data and not is_under_way(result)):
        return result
    task, cancelled = await _wait_to_end(top_of(result) if data else finished(result, what), result, True)
    failure = _failure_of(task, what)
    if cancelled is not None:
        if failure is not None and not task.cancelled():
            raise cancelled from failure
        raise cancelled
    if failure is not None:
        raise failure
    return task.result()
