"""Pause and resume: the names that clients have for it, the state that they keep, and a resume after a failure."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from .._version import see
from ..errors import MisuseError
from .waiting import Call, Outcome, attempt, is_under_way, tell_besides

log = logging.getLogger("megapatch")

PAUSE, RESUME = "pause_generation", "resume_generation"
EVENT = "generation_paused_event"
"""Attribute of clients that record whether they are paused; it has is_set() and clear()."""

_NOT_RESUMED = "generation could not be resumed"


def is_paused(client: object) -> bool:
    """Return whether the client records that it is paused.

    Raises:
        MisuseError: it would have to be waited for, like a coroutine: true for any `if`.
    """
    event: Any = getattr(client, EVENT, None)
    if event is None:
        return False
    answer = event.is_set()
    if is_under_way(answer):
        raise MisuseError(f"{EVENT}.is_set() returned a {type(answer).__name__}; expected True or False")
    return bool(answer)


@contextlib.asynccontextmanager
async def resumed_on_failure(client: object) -> AsyncIterator[None]:
    """Wrap a weight sync whose caller pauses and resumes generation, but does not resume after an exception."""
    try:
        yield
    except BaseException as error:
        log_failed_sync(error)
        if getattr(client, EVENT, None) is None or is_paused(client):
            await resume_once(getattr(client, RESUME), error, attempt)
        raise


def log_failed_sync(error: BaseException) -> None:
    """Log that engines may hold a mixture of weights."""
    log.error(
        "a weight sync failed (%s: %s): engines may hold a mixture of old and new weights until one succeeds"
        + see("mixture"),
        type(error).__name__,
        error,
    )


async def resume_once(
    resume: Call, error: BaseException | None, attempt: Callable[[Call, str], Awaitable[Outcome]]
) -> None:
    """Resume. Raise a cancellation that arrived meanwhile, or a failure if no `error` is being raised.

    Args:
        resume: the client's way to do it.
        error: the exception that is being raised, if any.
        attempt: makes the call and waits for it: that of `waiting`, or its like where no event loop is running.
    """
    failure, cancelled = await attempt(resume, f"{RESUME}()")
    raised = cancelled or error
    if failure is not None and raised is not None:
        tell_besides(_NOT_RESUMED, failure, raised, "not-resumed")
    if cancelled is not None:
        raise cancelled
    if failure is not None and error is None:
        if add_note := getattr(failure, "add_note", None):  # from Python 3.11 on
            add_note(_NOT_RESUMED)
        raise failure
