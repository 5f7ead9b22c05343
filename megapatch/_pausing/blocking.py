"""Wait for calls where no event loop is running, by the rule of `waiting`."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from .waiting import Call, Outcome, as_failure, begin, finished, ordinary

_T = TypeVar("_T")


def running_loop() -> str | None:
    """Return the name of the library whose event loop this code runs in: asyncio, or one that sniffio knows.

    None where there is no loop.
    """
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        return "asyncio"
    sniffio: Any = sys.modules.get("sniffio")  # trio imports it
    if sniffio is None:
        return None
    try:
        return str(sniffio.current_async_library())
    except sniffio.AsyncLibraryNotFoundError:
        return None


class Blocking:
    """Wait for calls in one loop for all of them, to which clients may be bound.

    Its tasks stand still between the calls, and `close` ends them.
    """

    def __init__(self) -> None:
        self._loop: Any = None

    async def attempt(self, call: Call, what: str, interruptible: bool = False) -> Outcome:
        """Attempt the call as `waiting.attempt` does, but block. Awaits nothing."""
        import asyncio

        try:
            result = begin(call)  # not in the loop: it may run one itself
            if not isinstance(result, (type(None), bool)):
                self.run(finished(result, what))
        except (Exception, asyncio.CancelledError) as error:
            return ordinary(as_failure(what, error)), None
        return None, None

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end; Ctrl-C cancels it."""
        import asyncio

        self._loop = self._loop or asyncio.new_event_loop()
        task = self._loop.create_task(coroutine)
        try:
            result: _T = self._loop.run_until_complete(task)
            return result
        except KeyboardInterrupt:
            task.cancel()
            self._loop.run_until_complete(asyncio.wait([task]))
            raise

    def close(self) -> None:
        """End the loop, and first all tasks left in it."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        try:
            loop.run_until_complete(_end(loop))
        finally:
            loop.close()


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


def finish(result: object, what: str) -> None:
    """Block until nothing in the result of a call is under way. Call it where no event loop is running."""
    if result is None:
        return
    blocking = Blocking()
    try:
        blocking.run(finished(result, what))
    finally:
        blocking.close()


def attempt_and_block(call: Call, what: str) -> Exception | None:
    """Make a call, block until it is done, and return its failure."""
    blocking = Blocking()
    try:
        failure, _ = without_loop(blocking.attempt(call, what))
        return failure
    finally:
        blocking.close()
