"""Generation paused around a weight sync, and resumed however the sync ends.

    async with paused_generation(client):      # `with` where no event loop is running
        await broadcast_weights()

Without a pause, requests in flight are served by a mixture of old and new weights. If an exception leaves
generation paused, no request is ever served again.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from ..errors import MisuseError
from ._cancellation import is_remote, outlast, tell_besides

log = logging.getLogger("megapatch")

PAUSE, RESUME = "pause_generation", "resume_generation"
EVENT = "generation_paused_event"
"""Attribute of clients that record whether they are paused; it has is_set() and clear()."""

_WAYS_TO_PAUSE = (PAUSE, "abort_generation")
_IN_LOOP = "an event loop is running here, and `with` cannot wait for it: use `async with paused_generation(...)`"

_Call = Callable[..., object]
_Outcome = tuple["Exception | None", "BaseException | None"]
_Result = TypeVar("_Result")

_warned: set[type] = set()


class paused_generation:
    """Pause generation, run the body (a weight sync), resume generation. Each instance can be used once.

    The value of `as` is whether generation is paused in the body. It depends on the state on entry:

    running         it is paused, and resumed after the body, however that ends
    already paused  (the client's `generation_paused_event` is set) it is neither paused nor resumed
    not pausable    the client or its engines lack the method, or it raises NotImplementedError, which is taken to
                    mean that nothing was paused: the body still runs, with one warning per class of clients

    If pausing fails or is cancelled, the body does not run, and generation is left running. The event is cleared
    if pausing had set it. A client without an event asks servers, some of which may be paused, so it is asked to
    resume; this comes too early for a server that has yet to get the request to pause.

    If the body fails or is cancelled, an ERROR on the logger "megapatch" says that engines may hold a mixture of
    old and new weights. The exception of the body is raised after generation was resumed.

    If resuming fails, it is not attempted again. Its exception is raised; or, when another is already being
    raised, it is added to that as a note (from Python 3.11 on) and logged as an ERROR.

    Cancellation, however often, does not reach the resume, and is delivered when that is over; a failure of the
    body is then its `__context__`. Only two things interrupt a resume: the cancellation of all tasks of the event
    loop, as by asyncio.run() at its end, and Ctrl-C in a `with`.

    `with` blocks: ray.get() waits for Ray, and asyncio.run() runs coroutines. It cannot do that where an event
    loop is running, and raises MisuseError; use `async with` there.

    Callers have to keep two syncs from overlapping: the second one takes generation as paused, and the first one
    resumes it.

    Args:
        client: has `pause_generation` and `resume_generation`: coroutine functions, plain functions, or methods of
            a Ray actor, whose handle `client` is then. May be None if both functions are given.
        pause: called without arguments in place of `client.pause_generation`. An awaitable result is awaited; a
            list of ObjectRefs is not.
        resume: called likewise in place of `client.resume_generation`.

    Raises:
        MisuseError: on entry: it was used before, or `with` would have to wait for a coroutine in an event loop.
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
            raise MisuseError(_IN_LOOP)  # before pausing what could not be resumed
        return _without_loop(self._enter(_blocking, _blocking_attempt))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _without_loop(self._exit(error, _blocking_attempt))

    async def _enter(
        self, wait: Callable[[_Call], Awaitable[None]], attempt: Callable[[_Call], Awaitable[_Outcome]]
    ) -> bool:
        if self._used:
            raise MisuseError("paused_generation() was already used; make a new one for each weight sync")
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
            log_failed_sync(error)
        if self._to_resume and self._resume is not None:
            await _resume_once(self._resume, error, attempt)


@contextlib.contextmanager
def unmarked_on_failure(client: object) -> Iterator[None]:
    """Wrap a pause: if it fails or is cancelled, clear the event that it has set."""
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
    """Wrap a weight sync whose caller pauses and resumes generation, but does not resume after an exception."""
    try:
        yield
    except BaseException as error:
        log_failed_sync(error)
        if getattr(client, EVENT, None) is None or is_paused(client):
            await _resume_once(getattr(client, RESUME), error, _attempt)
        raise


# ------------------------------------------------------------------------------------------ to resume, once
async def _resume_once(
    resume: _Call, error: BaseException | None, attempt: Callable[[_Call], Awaitable[_Outcome]]
) -> None:
    """Resume. Raise a cancellation that arrived meanwhile, or a failure if no `error` is being raised."""
    failure, cancelled = await attempt(resume)
    raised = cancelled or error
    if failure is not None and raised is not None:
        tell_besides("generation could not be resumed", failure, raised)
    if cancelled is not None:
        raise cancelled
    if failure is not None and error is None:
        raise failure


async def _attempt(call: _Call) -> _Outcome:
    """Call it and wait until it is done, cancelled or not. Return its failure and the first cancellation."""
    import asyncio  # here and below: `import megapatch` must not import it

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
    """Call it and block until it is done. Awaits nothing, so that `_without_loop` can run it."""
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
    """Run a coroutine that never waits for an event loop. So `with` and `async with` share their code."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _Result = end.value
        return result
    raise AssertionError("the coroutine waits for an event loop")


# ------------------------------------------------------------------------------------------ state and warnings
def is_paused(client: object) -> bool:
    event: Any = getattr(client, EVENT, None)
    return event is not None and bool(event.is_set())


def _cannot_pause(error: BaseException) -> bool:
    """Whether the error means that the engine cannot pause.

    An AttributeError may have any cause; that of an engine, possibly through Ray, can only be told by its text.
    """
    if isinstance(error, AttributeError):
        return any(f"no attribute '{name}'" in str(error) for name in _WAYS_TO_PAUSE)
    return isinstance(error, NotImplementedError)


def _warn(client: object, why: str) -> None:
    if type(client) not in _warned:
        _warned.add(type(client))
        log.warning(
            "%s cannot pause generation (%s): weights are synced while it runs, and requests in flight may see a "
            "mixture of old and new weights",
            type(client).__name__,
            why,
        )


def log_failed_sync(error: BaseException) -> None:
    log.error(
        "a weight sync failed (%s: %s): engines may hold a mixture of old and new weights until one succeeds",
        type(error).__name__,
        error,
    )
