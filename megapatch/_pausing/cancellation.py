"""Calls that a cancellation must not reach, and failures other than the one that is raised."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._troubleshooting import see

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("megapatch")


def is_remote(call: Callable[..., object]) -> bool:
    """Return whether it is a Ray actor's method. Looks at the type, because a mock has every attribute."""
    return callable(getattr(type(call), "remote", None))


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


def tell_besides(prefix: str, failure: BaseException, raised: BaseException, entry: str) -> None:
    """Report a failure other than the one that is raised: in the log, and in a note on that one.

    Args:
        entry: the anchor of its entry in docs/troubleshooting.md.
    """
    text = f"{prefix}: {type(failure).__name__}: {failure}"
    log.error("%s (after %s)" + see(entry), text, type(raised).__name__, exc_info=failure)
    if add_note := getattr(raised, "add_note", None):  # from Python 3.11 on
        add_note(text)
