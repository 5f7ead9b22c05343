"""Generation paused around a weight sync, and resumed however the sync ends.

    async with paused_generation(client):      # `with` where no event loop is running
        await broadcast_weights()

Without a pause, requests in flight are served by a mixture of old and new weights. If an exception leaves
generation paused, no request is ever served again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

from .._pausing.blocking import Blocking, running_loop, without_loop
from .._pausing.generation import (
    EVENT,
    PAUSE,
    RESUME,
    is_paused,
    log_failed_sync,
    resume_once,
    unmarked_on_failure,
)
from .._pausing.waiting import Call, Outcome, attempt
from .._troubleshooting import see
from ..errors import MisuseError

log = logging.getLogger("megapatch")

_WAYS_TO_PAUSE = (PAUSE, "abort_generation")
_OTHER_LOOP = "paused_generation() waits with asyncio, and this code runs in {}: use `with` in a thread of its own"
_IN_LOOP = (
    "an event loop is running here ({}), and `with` would block it: use `async with paused_generation(...)`, or "
    "`with` in a thread of its own, as by asyncio.to_thread()"
)

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

    Results of `pause` and `resume` are waited for: an awaitable such as Ray's ObjectRef, a
    `concurrent.futures.Future`, and each of several in a list or another container. A result that stands for work
    that cannot be waited for, such as a generator or a thread, is a MisuseError, as a failure of that call.

    A CancelledError that the client raises by itself is a failure like others, as a MegapatchError.

    `async with` needs asyncio. `with` blocks, with one event loop for both calls, in which nothing runs meanwhile
    and which is closed at the end; a client whose connections are bound to a loop and outlive a sync needs
    `async with`. Where an event loop is running, `with` is refused before anything is paused: nobody knows
    whether `resume` would need that loop.

    Callers have to keep two syncs from overlapping: the second one takes generation as paused, and the first one
    resumes it.

    Args:
        client: has `pause_generation` and `resume_generation`: coroutine functions, plain functions, or methods of
            a Ray actor, whose handle `client` is then. May be None if both functions are given.
        pause: called without arguments in place of `client.pause_generation`.
        resume: called likewise in place of `client.resume_generation`.

    Raises:
        MisuseError: on entry: it was used before, `with` was used in an event loop, or `async with` in one that is
            not asyncio's.
    """

    def __init__(self, client: object, *, pause: Call | None = None, resume: Call | None = None) -> None:
        self._client = client
        self._pause = pause or getattr(client, PAUSE, None)
        self._resume = resume or getattr(client, RESUME, None)
        self._used = self._to_resume = False

    async def __aenter__(self) -> bool:
        if (library := running_loop()) != "asyncio":
            raise MisuseError(_OTHER_LOOP.format(library or "another event loop"))
        return await self._enter(attempt)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit(error, attempt)

    def __enter__(self) -> bool:
        if library := running_loop():
            raise MisuseError(_IN_LOOP.format(library))  # before a pause that could not be undone
        self._blocking = Blocking()
        try:
            return without_loop(self._enter(self._blocking.attempt))
        except BaseException:
            self._blocking.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            without_loop(self._exit(error, self._blocking.attempt))
        finally:
            self._blocking.close()

    async def _enter(self, attempt: Callable[..., Awaitable[Outcome]]) -> bool:
        if self._used:
            raise MisuseError("paused_generation() was already used; make a new one for each weight sync")
        self._used = True
        if is_paused(self._client):
            return True
        if self._pause is None or self._resume is None:
            _warn(self._client, f"it has no {PAUSE if self._pause is None else RESUME}")
            return False
        cancelled: BaseException | None
        try:
            with unmarked_on_failure(self._client):
                failure, cancelled = await attempt(self._pause, f"{PAUSE}()", interruptible=True)
                if failure is not None:
                    raise cancelled or failure
        except BaseException as error:
            if _cannot_pause(error):
                _warn(self._client, f"{type(error).__name__}: {error}")
                return False
            if getattr(self._client, EVENT, None) is None:
                await resume_once(self._resume, error, attempt)
            raise
        if cancelled is not None:  # and the client has paused nevertheless
            await resume_once(self._resume, cancelled, attempt)
            raise cancelled
        self._to_resume = True
        return True

    async def _exit(self, error: BaseException | None, attempt: Callable[..., Awaitable[Outcome]]) -> None:
        if error is not None:
            log_failed_sync(error)
        if self._to_resume and self._resume is not None:
            await resume_once(self._resume, error, attempt)


# ------------------------------------------------------------------------------------------ warnings
def _cannot_pause(error: BaseException) -> bool:
    """Return whether the error means that the engine cannot pause.

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
            "mixture of old and new weights" + see("no-pause"),
            type(client).__name__,
            why,
        )
