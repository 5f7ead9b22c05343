"""Call functions of any kind from the event loop without blocking it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from ..weight_sync._cancellation import is_remote, outlast
from ._timer import Timer
from ._watchdog import Watchdog

_T = TypeVar("_T")


async def perform(
    call: Callable[..., Any],
    *args: Any,
    thread: Executor | None = None,
    watchdog: Watchdog | None = None,
    **kwargs: Any,
) -> Any:
    """Call a Ray actor's method, a coroutine function or a plain function, and return its result.

    A plain function runs in the thread, or right here if there is none.
    """
    if is_remote(call):
        result = call.remote(*args, **kwargs)  # type: ignore[attr-defined]
    elif thread is None or inspect.iscoroutinefunction(call):
        result = call(*args, **kwargs)
    else:
        function = functools.partial(_raising_no_stop_iteration, call, *args, **kwargs)
        future = asyncio.get_running_loop().run_in_executor(thread, function)
        result = await _watched(future, call, watchdog)
    return await _watched(result, call, watchdog) if inspect.isawaitable(result) else result


async def _watched(result: Awaitable[Any], call: Callable[..., Any], watchdog: Watchdog | None) -> Any:
    if watchdog is None:
        return await result
    timer = watchdog.watch(call)
    try:
        return await result
    finally:
        timer.cancel()


async def wait_out(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return the coroutine's result. A cancellation does not reach it, and is raised when it is over."""
    task = asyncio.ensure_future(coroutine)
    cancelled = await outlast(task)
    if cancelled is not None:
        raise_cancelled(cancelled, task)
    return task.result()


def raise_cancelled(cancelled: BaseException, task: asyncio.Task[Any]) -> NoReturn:
    """Raise the cancellation, caused by the task's failure if there is one: `from None` would hide the context."""
    if (failure := failure_of(task)) is not None:
        raise cancelled from failure
    raise cancelled


def failure_of(task: asyncio.Task[Any]) -> BaseException | None:
    """Return why a finished task failed, or None if it did not fail."""
    return None if task.cancelled() else task.exception()


class SequentialCalls:
    """Makes calls one at a time, in the order in which they were requested.

    Plain functions all run in one thread, so a CUDA device that is current there stays current.
    """

    def __init__(self, timer: Timer, watchdog: Watchdog) -> None:
        self._turn = asyncio.Lock()  # which is fair
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megapatch-trainer")  # ends when this object does
        self._timer, self.watchdog = timer, watchdog

    async def __call__(
        self, owner: Any, method: str, *args: Any, unless: Callable[[], bool] = lambda: False, **kwargs: Any
    ) -> Any:
        """Return the call's result; or None, without calling, if `unless()` is true when its turn has come."""
        async with self._turn:
            if unless():
                return None
            with self._timer.phase(method):
                call = getattr(owner, method)
                return await perform(call, *args, thread=self._thread, watchdog=self.watchdog, **kwargs)


def _raising_no_stop_iteration(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function, and turn StopIteration into RuntimeError.

    A future cannot hold a StopIteration: awaiting it would take forever.
    """
    try:
        return call(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(f"{getattr(call, '__qualname__', call)} raised StopIteration") from error
