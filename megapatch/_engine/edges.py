"""Guards where the code of others runs inside ours, or interrupts it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from .._troubleshooting import see

log = logging.getLogger("megapatch")


def clean_record(record: logging.LogRecord) -> bool:
    """Log filter: clean a message and its traceback."""
    from .._printable import clean_record  # many processes log nothing

    return clean_record(record)


def say(text: str) -> None:
    """Print to standard error; if that takes nothing, there is nowhere else."""
    if sys.stderr is not None:  # print() would take standard output instead
        with contextlib.suppress(Exception):
            print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def broken_modules_are_logged() -> Iterator[None]:
    """Log an error of a module that is looked at here: it must not break the import of another."""
    try:
        yield
    except Exception as error:
        if comes_from_outside(error):
            raise
        log.warning("patches could not be considered" + see("not-considered"), exc_info=True)


def comes_from_outside(error: BaseException) -> bool:
    """Return whether the exception has nothing to do with the code that it interrupted.

    Ctrl-C, and whatever a signal handler raises: the SystemExit of SIGTERM, or the TimeoutError of an alarm. The
    SystemExit of the code itself, such as that of an argument parser, is its failure.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    return not _codes_in(error.__traceback__).isdisjoint(_codes_of_handlers())


def _codes_in(traceback: TracebackType | None) -> set[Any]:
    found = set()
    while traceback is not None:
        found.add(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    return found


def _codes_of_handlers() -> set[Any]:
    import signal  # a millisecond, which only a failure costs

    handlers: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = (getattr(handler, "__func__", getattr(handler, "func", handler)) for handler in handlers)
    called = (function if hasattr(function, "__code__") else type(function).__call__ for function in functions)
    return {code for function in called if (code := getattr(function, "__code__", None)) is not None}
