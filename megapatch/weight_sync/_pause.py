"""Generation paused around a weight sync, and resumed however the sync ends.

    async with paused_generation(client):      # `with` where no event loop is running
        await broadcast_weights()

Without a pause, requests in flight are served by a mixture of old and new weights. With one that is not taken
back after an exception, no request is served ever again.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import MisuseError
from ._cancellation import is_remote, outlast, tell_besides

if TYPE_CHECKING:
    pass

log = logging.getLogger("megapatch")

PAUSE, RESUME = "pause_generation", "resume_generation"
EVENT = "generation_paused_event"
"""What a client that keeps its own record of being paused calls it: it has is_set() and clear()."""

_WAYS_TO_PAUSE = (PAUSE, "abort_generation")
_IN_LOOP = "an event loop is running here, and `with` cannot wait for it: use `async with paused_generation(...)`"

_Call = Callable[..., object]
_Outcome = tuple["Exception | None", "BaseException | None"]
_Result = TypeVar("_Result")

_warned: set[type] = set()


class paused_generation:
    """Pause generation, run the body (a weight sync), resume generation. To be used once.

    client         has `pause_generation` and `resume_generation`: coroutine functions, plain functions, or methods
                   of a Ray actor, whose handle `client` is then
    pause, resume  other functions to call instead, without arguments. What they return is waited for when it is
                   awaitable; a list of ObjectRefs is not.

    The value of `as` is whether generation is paused in the body. What it is on entry decides:

    running         paused, and resumed after the body, however that ends
    paused already  neither paused nor resumed: the client's `generation_paused_event` is set
    not pausable    the client or its engines have no such method, or it raises NotImplementedError, which is taken
                    to have paused nothing: the body runs all the same, with one warning for each class of clients

    Pausing fails or is cancelled: the body does not run, and generation is left running. An event that was set is
    cleared; a client without one (it asks servers, and some of them may be paused) is told to resume, which comes
    too early for a server that is still to get the request to pause.
    The body fails or is cancelled: an ERROR on the logger "megapatch" says that engines may hold a mixture of old
    and new weights. Its exception is raised after generation was resumed.
    Resuming fails: it was attempted once and is not repeated. Its exception is raised; or, when there is already
    one to raise, it is a note there (from Python 3.11 on) and an ERROR in the log.
    Cancellation, however often, does not reach the resume, and is delivered when that is over; a failure of the
    body is then its `__context__`. Only what cancels all tasks of the event loop while the resume is under way,
    as asyncio.run() does in the end, cancels that, too; and so does Ctrl-C in a `with`.

    `with` blocks: ray.get() waits for Ray, asyncio.run() runs coroutines. That cannot be done where an event loop
    is running, and raises MisuseError; use `async with` there.

    Two syncs at once are for the caller to keep apart: the second takes generation as paused, and the first one
    resumes it.
    """

    def __init__(self, client: object, *, pause: _Call | None = None, resume: _Call | None = None) -> None:
        self._client = client
        self._pause = pause or getattr(client, PAUSE, None)
        self._resume = resume or getattr(client, RESUME, None)
        self._used = self._to_resume = False

    async def __aenter__(self) -> bool:
        return await self._enter(_awaited, _attempt)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit(error, _attempt)

    def __enter__(self) -> bool:
        if _loop_is_running() and any(map(inspect.iscoroutinefunction, (self._pause, self._resume))):
            raise MisuseError(_IN_LOOP)  # before anything is paused that could not be resumed
        return _without_loop(self._enter(_blocking, _blocking_attempt))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _without_loop(self._exit(error, _blocking_attempt))

    async def _enter(
        self, wait: Callable[[_Call], Awaitable[None]], attempt: Callable[[_Call], Awaitable[_Outcome]]
    ) -> bool:
        if self._used:
            raise MisuseError("paused_generation() was entered before; make a new one for each weight sync")
        self._used = True
        if is_paused(self._client):
            return True
        if self._pause is None or self._resume is None:
            _warn(self._client, f"it has no {PAUSE if self._pause is None else RESUME}")
            return False
        try:
            with unmarked_on_failure(self._client):
                await wait(self._pause)
        except BaseException as error:
            if _cannot_pause(error):
                _warn(self._client, f"{type(error).__name__}: {error}")
                return False
            if getattr(self._client, EVENT, None) is None:
                await _resume_once(self._resume, error, attempt)
            raise
        self._to_resume = True
        return True

    async def _exit(self, error: BaseException | None, attempt: Callable[[_Call], Awaitable[_Outcome]]) -> None:
        if error is not None:
            _log_failed_sync(error)
        if self._to_resume and self._resume is not None:
            await _resume_once(self._resume, error, attempt)


@contextlib.contextmanager
def unmarked_on_failure(client: object) -> Iterator[None]:
    """Around a pause: when it fails or is cancelled, the event that it has set is cleared."""
    event: Any = getattr(client, EVENT, None)
    ours = event is not None and not event.is_set()
    try:
        yield
    except BaseException:
        if ours:
            event.clear()
        raise


@contextlib.asynccontextmanager
async def resumed_on_failure(client: object) -> AsyncIterator[None]:
    """Around a weight sync whose caller has paused generation and resumes it, though not after an exception."""
    try:
        yield
    except BaseException as error:
        _log_failed_sync(error)
        if getattr(client, EVENT, None) is None or is_paused(client):
            await _resume_once(getattr(client, RESUME), error, _attempt)
        raise


# ------------------------------------------------------------------------------------------ to resume, once
async def _resume_once(
    resume: _Call, error: BaseException | None, attempt: Callable[[_Call], Awaitable[_Outcome]]
) -> None:
    """Raises a cancellation that came meanwhile, or why it failed when nothing else (`error`) is being raised."""
    failure, cancelled = await attempt(resume)
    raised = cancelled or error
    if failure is not None and raised is not None:
        tell_besides("generation could not be resumed", failure, raised)
    if cancelled is not None:
        raise cancelled
    if failure is not None and error is None:
        raise failure


async def _attempt(call: _Call) -> _Outcome:
    """Call it and wait until it is done, cancelled or not: why it failed, and the first cancellation."""
    import asyncio  # here and below: `import megapatch` needs none

    cancelled: BaseException | None = None
    try:
        result = _begin(call)
        if inspect.isawaitable(result):
            future = asyncio.ensure_future(result)
            cancelled = await outlast(future)
            future.result()
    except Exception as failure:
        return failure, cancelled
    return None, cancelled


async def _blocking_attempt(call: _Call) -> _Outcome:
    try:
        await _blocking(call)
    except Exception as failure:
        return failure, None
    return None, None


# ------------------------------------------------------------------------------------------ to call and wait
def _begin(call: _Call) -> object:
    return call.remote() if is_remote(call) else call()  # type: ignore[attr-defined]


async def _awaited(call: _Call) -> None:
    result = _begin(call)
    if inspect.isawaitable(result):
        await result


async def _blocking(call: _Call) -> None:
    """Awaits nothing: `_without_loop` is to run it."""
    result = _begin(call)
    ray: Any = sys.modules.get("ray")
    if isinstance(result, getattr(ray, "ObjectRef", ())):
        ray.get(result)
    elif inspect.isawaitable(result):
        if _loop_is_running():
            if inspect.iscoroutine(result):
                result.close()
            raise MisuseError(_IN_LOOP)
        import asyncio

        async def wait() -> None:
            await result

        asyncio.run(wait())


def _loop_is_running() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _without_loop(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run one that never waits for an event loop: so `with` and `async with` are the same code."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    raise AssertionError("it waits for an event loop")


# ------------------------------------------------------------------------------------------ what is the case
def is_paused(client: object) -> bool:
    event: Any = getattr(client, EVENT, None)
    return event is not None and bool(event.is_set())


def _cannot_pause(error: BaseException) -> bool:
    """An AttributeError may be anything; one of an engine's, possibly through Ray, has only its text."""
    if isinstance(error, AttributeError):
        return any(f"no attribute '{name}'" in str(error) for name in _WAYS_TO_PAUSE)
    return isinstance(error, NotImplementedError)


def _warn(client: object, why: str) -> None:
    if type(client) not in _warned:
        _warned.add(type(client))
        log.warning(
            "%s cannot pause generation (%s): weights are synced while it goes on, and requests in flight may see "
            "a mixture of old and new ones",
            type(client).__name__,
            why,
        )


def _log_failed_sync(error: BaseException) -> None:
    log.error(
        "a weight sync failed (%s: %s): engines may hold a mixture of old and new weights until one succeeds",
        type(error).__name__,
        error,
    )
