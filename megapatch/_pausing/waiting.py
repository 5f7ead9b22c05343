"""Wait for the result of a call, of any kind: one rule for pauses, resumes, weight syncs and a pump's calls.

awaitable                       awaited, then its result is looked at; Ray's ObjectRef is one
`concurrent.futures.Future`     likewise, as of an executor or of `asyncio.run_coroutine_threadsafe`
dict, list, tuple, set          each of its values, all of them even when one fails
generator, function             MisuseError: nothing in it may have run
torch's Work, thread, process   MisuseError: it may be under way, and its kind of wait is not known here
anything else                   a result
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Coroutine, Sequence
from types import AsyncGeneratorType, FunctionType, GeneratorType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from .._version import see
from ..errors import MegapatchError, MisuseError

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("megapatch")

Call = Callable[..., object]
Outcome = tuple["Exception | None", "BaseException | None"]
_T = TypeVar("_T")
_NOT_BEGUN = (GeneratorType, AsyncGeneratorType, FunctionType, MethodType)
_ENDED = ("done", "ready", "poll", "is_alive", "is_completed")
_WAITS = ("wait", "result", "join")
"""A handle of work has a method of each kind."""


def is_remote(call: Callable[..., object]) -> bool:
    """Return whether it is a Ray actor's method. Looks at the type, because a mock has every attribute."""
    return callable(getattr(type(call), "remote", None))


def begin(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it, and return its result, which may be something to wait for."""
    return (call.remote if is_remote(call) else call)(*args, **kwargs)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------ what is under way
def is_under_way(result: object) -> bool:
    """Return whether a result is one thing to wait for: an awaitable or a concurrent future."""
    return inspect.isawaitable(result) or _is_concurrent(type(result))


def _is_concurrent(kind: type) -> bool:
    futures = sys.modules.get("concurrent.futures._base")  # where it is not loaded nobody has one
    return futures is not None and issubclass(kind, futures.Future)


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
        MisuseError: it may stand for work that cannot be waited for.
        Exception: the first failure, when all else has ended, too. The others are logged.
    """
    result = await top_of(result)
    if (wrong := _wrong_with(type(result))) is not None:
        raise MisuseError(
            f"{what} returned a {type(result).__name__}, {wrong}. Wrap the call in a function, or a coroutine "
            "function, that waits until the work is done and returns None"
        )
    if _is_done(result):
        return result
    import asyncio

    found = await asyncio.gather(*(finished(part, what) for part in _parts(result)), return_exceptions=True)
    _raise_first(what, found)
    return dict(zip(result, found, strict=True)) if isinstance(result, dict) else found


def _wrong_with(kind: type) -> str | None:
    if issubclass(kind, _NOT_BEGUN):
        return "in which nothing may have run"
    if all(any(callable(getattr(kind, name, None)) for name in names) for names in (_ENDED, _WAITS)):
        return "which may be under way"
    return None


def _parts(result: object) -> list[Any]:
    if isinstance(result, dict):
        return list(result.values())
    return list(result) if isinstance(result, (list, tuple, set, frozenset)) else []


def _is_done(result: object) -> bool:
    return not is_under_way(result) and not _wrong_with(type(result)) and all(map(_is_done, _parts(result)))


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


def tell_besides(prefix: str, failure: BaseException, raised: BaseException, entry: str) -> None:
    """Report a failure other than the one that is raised: in the log, and in a note on that one.

    Args:
        entry: the anchor of its entry in docs/troubleshooting.md.
    """
    text = f"{prefix}: {type(failure).__name__}: {failure}"
    log.error("%s (after %s)" + see(entry), text, type(raised).__name__, exc_info=failure)
    if add_note := getattr(raised, "add_note", None):  # from Python 3.11 on
        add_note(text)


# ------------------------------------------------------------------------------------------ in an event loop
async def wait_to_end(future: asyncio.Future[Any], interruptible: bool = False) -> BaseException | None:
    """Wait until the future is done, and return the first cancellation that arrived meanwhile, if any.

    No such cancellation reaches the future, unless it is interruptible. Only cancelling all tasks of the event
    loop, as asyncio.run() does at its end, cancels it.
    """
    import asyncio

    cancelled: BaseException | None = None
    while not future.done():
        try:
            await asyncio.wait([future])  # does not cancel the future when we are cancelled
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
            if interruptible:  # not before it has begun: a call may have to be made
                asyncio.get_running_loop().call_soon(future.cancel)
    return cancelled


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
    task, cancelled = await _run_to_end(finished(result, what), result, interruptible)
    return ordinary(_failure_of(task, what)), cancelled


async def _run_to_end(
    coroutine: Coroutine[Any, Any, _T], result: Any, interruptible: bool
) -> tuple[asyncio.Task[_T], BaseException | None]:
    """Run a coroutine that waits for a result in a task, to its end; return that, and the first cancellation."""
    import asyncio

    task = asyncio.ensure_future(coroutine)
    cancelled = await wait_to_end(task, interruptible)
    if inspect.iscoroutine(result) and inspect.getcoroutinestate(result) == inspect.CORO_CREATED:
        result.close()  # all tasks of the loop were cancelled, this one before it had begun
    return task, cancelled


def failure_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return why a finished task failed, or None if it did not fail."""
    return None if task.cancelled() else task.exception()


def raise_cancelled(cancelled: BaseException, task: asyncio.Task[Any]) -> NoReturn:
    """Raise the cancellation, caused by the task's failure if there is one: `from None` would hide the context."""
    if (failure := failure_of(task)) is not None:
        raise cancelled from failure
    raise cancelled


def _failure_of(task: asyncio.Task[Any], what: str) -> BaseException | None:
    return _cancelled(what) if task.cancelled() else failure_of(task)


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
        data: whether the call returns data; objects in it are not waited for. Otherwise the result is waited for
            as `finished` does.

    Raises:
        MegapatchError: the call was cancelled, and not by its caller.
    """

    if result is None or (data and not is_under_way(result)):
        return result
    waiting = top_of(result) if data else finished(result, what)
    task, cancelled = await _run_to_end(waiting, result, True)
    failure = _failure_of(task, what)
    if cancelled is not None:
        raise_cancelled(cancelled, task)
    if failure is not None:
        raise failure
    return task.result()
