"""Wait for calls where no event loop is running, by the rule of `waiting`."""

from __future__ import annotations

import _thread
import functools
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .waiting import Call, Outcome, as_failure, begin, finished, ordinary

_T = TypeVar("_T")


def is_in_loop() -> bool:
    """Return whether this code runs in an event loop of asyncio."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Blocking:
    """Wait for calls in one loop for all of them, to which clients may be bound.

    The loop runs in threads of its own: Ctrl-C, which the main thread gets, cannot end it between a task and what
    was to wake it. Its tasks stand still between the calls, and `close` ends them.
    """

    def __init__(self) -> None:
        self._loop: Any = None

    async def attempt(self, call: Call, what: str, interruptible: bool = False) -> Outcome:
        """Attempt the call as `waiting.attempt` does, but block. Awaits nothing.

        An exception from a signal handler that interrupts the wait counts as a cancellation.
        """
        import asyncio

        try:
            result = begin(call)  # not in the loop: it may run one itself
            if isinstance(result, (type(None), bool)):
                return None, None
            _, failure, interruption = self._run(finished(result, what), interruptible)
            return ordinary(None if failure is None else as_failure(what, failure)), interruption
        except (Exception, asyncio.CancelledError) as error:
            return ordinary(as_failure(what, error)), None

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end, and return its result; Ctrl-C cancels it."""
        result, failure, interruption = self._run(coroutine, interruptible=True)
        if interruption is not None:
            raise interruption
        if failure is not None:
            raise failure
        found: _T = result
        return found

    def _run(
        self, coroutine: Coroutine[Any, Any, Any], interruptible: bool
    ) -> tuple[Any, BaseException | None, BaseException | None]:
        """Return the coroutine's result or failure, and what has interrupted this.

        One interruption cancels the coroutine, if it is interruptible. A second one gives it up, with its loop.
        Nothing here holds a lock of Python's own, which an interruption may leave locked.
        """
        import asyncio

        loop = self._loop = self._loop or asyncio.new_event_loop()
        task, set_device = loop.create_task(coroutine), device_setter()
        claim, end, ended = [None], list[tuple[Any, BaseException | None]](), _thread.allocate_lock()

        def run_task() -> None:
            try:
                claim.pop()
            except IndexError:
                return  # another thread has it
            try:
                set_device()
                end.append((loop.run_until_complete(task), None))
            except BaseException as error:
                end.append((None, error))
            ended.release()

        ended.acquire()
        interruption: BaseException | None = None
        while True:
            try:
                if claim:  # no thread has begun; an interruption may have kept one from that
                    _thread.start_new_thread(run_task, ())  # threading waits with such a lock until it runs
                while not end:
                    ended.acquire(timeout=1)  # not for ever: it may be interrupted when it has the lock
                return *end[0], interruption
            except BaseException as error:
                if interruption is not None:
                    self._loop = None
                    raise
                interruption = error
                if interruptible:
                    loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """End the loop, and first all tasks left in it."""
        loop = self._loop
        if loop is None:
            return
        try:
            self.run(_end(loop))
        finally:
            self._loop = None  # first, for nothing closes one twice that was interrupted in it
            if not loop.is_running():
                loop.close()


def device_setter() -> Callable[[], None]:
    """Return a function that gives its thread the CUDA device of this one; a new thread has the first device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


async def _end(loop: Any) -> None:
    import asyncio

    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


def without_loop(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never waits for an event loop. So `with` and `async with` share their code."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise AssertionError("the coroutine waits for an event loop")


def attempt_and_block(call: Call, what: str) -> Exception | None:
    """Make a call, block until it is done, and return its failure. Raise what has interrupted it."""
    blocking = Blocking()
    try:
        failure, interruption = without_loop(blocking.attempt(call, what))
    finally:
        blocking.close()
    if interruption is not None:
        raise interruption
    return failure
