"""Call functions of any kind from the event loop without blocking it, time the calls, and warn of long ones."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from .._pausing.blocking import device_setter
from .._pausing.waiting import begin, failure_of, is_remote, raise_cancelled, result_of, wait_to_end
from .._version import see
from ._parts import Trainer

_T = TypeVar("_T")

log = logging.getLogger("megapatch")

PATIENCE = 600.0
"""Seconds after which a wait is a warning: a process may have died, or hang."""


class Timer:
    """Pump: adds up the seconds of each phase, by the event loop's clock.

    Phases may overlap: a trainer trains while the pump waits.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body, as a part of this phase."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + clock() - begun

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


class Watchdog:
    """Pump: logs one warning for each call that takes `PATIENCE` seconds.

    Attributes:
        others_waiting: returns a sentence on all else that waits; set by the pump.
    """

    def __init__(self) -> None:
        self.others_waiting: Callable[[], str] = str

    def watch(self, call: Any) -> asyncio.TimerHandle:
        """Watch a call, which is a function or text, until the result is cancelled."""
        return asyncio.get_running_loop().call_later(PATIENCE, self._warn, call)

    @contextlib.contextmanager
    def watching(self, call: Any) -> Iterator[None]:
        """Watch while this context is open."""
        timer = self.watch(call)
        try:
            yield
        finally:
            timer.cancel()

    def _warn(self, call: Any) -> None:
        what = call if isinstance(call, str) else f"{_name_of(call)}()"
        log.warning(
            "the pump has been waiting for %s for %d seconds. %s" + see("pump-waits"),
            *(what, PATIENCE, self.others_waiting()),
        )


def _name_of(call: Any) -> str:
    for name in ("__qualname__", "_method_name"):  # the latter is of a Ray actor's method
        if isinstance(found := getattr(call, name, None), str):
            return found
    return type(call).__name__


async def perform(
    call: Callable[..., Any],
    *args: Any,
    thread: Executor | None = None,
    watchdog: Watchdog | None = None,
    data: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a Ray actor's method, a coroutine function or a plain function, and return its result.

    A plain function runs in the thread, or right here if there is none.

    Args:
        data: whether it returns data. The result of another call is waited for in full, as `finished` does.
    """
    if thread is None or is_remote(call) or inspect.iscoroutinefunction(call):
        result = begin(call, *args, **kwargs)
    else:
        function = functools.partial(_raising_no_stop_iteration, call, *args, **kwargs)
        result = asyncio.get_running_loop().run_in_executor(thread, function)
    with watchdog.watching(call) if watchdog else contextlib.nullcontext():
        return await result_of(result, f"{_name_of(call)}()", data)


async def run_to_end(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return the coroutine's result. A cancellation does not reach it, and is raised when it is over."""
    task = asyncio.ensure_future(coroutine)
    cancelled = await wait_to_end(task)
    if cancelled is not None:
        raise_cancelled(cancelled, task)
    return task.result()


class SequentialCalls:
    """Training loop: makes calls one at a time, in the order in which they were requested.

    Plain functions all run in one thread, so a CUDA device that is current there stays current. At first it is the
    device of the thread that makes this object.
    """

    def __init__(self, timer: Timer, watchdog: Watchdog) -> None:
        self._turn = asyncio.Lock()  # which is fair
        self._thread = ThreadPoolExecutor(  # it ends when this object does
            1, thread_name_prefix="megapatch-trainer", initializer=device_setter()
        )
        self._timer, self.watchdog = timer, watchdog

    async def __call__(
        self,
        owner: Any,
        method: str,
        *args: Any,
        unless: Callable[[], bool] = lambda: False,
        data: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the call's result; or None, without calling, if `unless()` is true when its turn has come.

        data: as for `perform`.
        """
        async with self._turn:
            if unless():
                return None
            with self._timer.phase(method):
                call = getattr(owner, method)
                return await perform(call, *args, thread=self._thread, watchdog=self.watchdog, data=data, **kwargs)


def _raising_no_stop_iteration(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function, and turn StopIteration into RuntimeError.

    A future cannot hold a StopIteration: awaiting it would take forever.
    """
    try:
        return call(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(f"{getattr(call, '__qualname__', call)} raised StopIteration") from error


IN_FLIGHT = 2
"""Calls of train_microbatch() under way or waiting: the next is prepared during training on the current one."""


class MicrobatchQueue:
    """The train_microbatch calls of one step, of which at most `IN_FLIGHT` are running or queued at a time."""

    def __init__(self, calls: SequentialCalls, trainer: Trainer) -> None:
        self._calls, self._trainer = calls, trainer
        self._stopped = False
        self.tasks: deque[asyncio.Task[None]] = deque()

    def put(self, data: Any) -> None:
        """Queue a call."""
        self.tasks.append(asyncio.ensure_future(self._train(data)))

    def reap(self) -> None:
        """Forget finished calls; raise the exception of the first that failed."""
        while self.tasks and self.tasks[0].done():
            self.tasks.popleft().result()

    async def wait_for_room(self) -> None:
        """Wait until fewer than `IN_FLIGHT` calls are left, and raise the exception of one that failed."""
        await self._wait_for_fewer_than(IN_FLIGHT)

    async def wait_until_empty(self) -> None:
        """Wait until all calls have ended, and raise the exception of one that failed."""
        await self._wait_for_fewer_than(1)

    @property
    def failure(self) -> BaseException | None:
        """The failure of a call that was not raised."""
        failures = [failure_of(task) for task in self.tasks if task.done()]
        return next((failure for failure in failures if failure is not None), None)

    async def stop(self) -> list[BaseException]:
        """Make no more calls, wait for the running one, and return failures that were not raised."""
        self._stopped = True
        if self.tasks:
            await asyncio.wait(self.tasks)
        return [failure for task in self.tasks if (failure := failure_of(task)) is not None]

    async def _wait_for_fewer_than(self, number: int) -> None:
        self.reap()
        while len(self.tasks) >= number:
            await asyncio.wait([self.tasks[0]])  # which leaves it alone when we are cancelled
            self.reap()

    async def _train(self, data: Any) -> None:
        try:
            await self._calls(self._trainer, "train_microbatch", data, unless=lambda: self._stopped)
        except BaseException:
            self._stopped = True  # now, before the next one gets its turn
            raise
