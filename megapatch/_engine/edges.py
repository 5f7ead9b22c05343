"""Guards where the code of others runs inside ours, or interrupts it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

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
    except Exception:
        log.warning("patches could not be considered" + see("not-considered"), exc_info=True)


def comes_from_outside(error: BaseException) -> bool:
    """Return whether an exception ends the program, as Ctrl-C and SIGTERM do, and is nobody's failure."""
    return isinstance(error, (KeyboardInterrupt, SystemExit))
