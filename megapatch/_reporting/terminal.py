"""Standard output and standard error: the width, who may write there, and what happens when nobody reads."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

NO_TERMINAL = 100


class OutputLost(Exception):
    """Standard output takes no more: its reader has gone, or the disk is full.

    The file leads nowhere from now on, so that the interpreter's last flush is quiet.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.reader_has_gone = isinstance(error, BrokenPipeError)


def write(text: str = "", end: str = "\n", file: TextIO | None = None) -> None:
    """Print to standard output, or to `file`. Raises OutputLost."""
    with _guarded(file or sys.stdout):
        print(text, end=end, file=file or sys.stdout)


def flush(file: TextIO | None = None) -> None:
    """Flush standard output, or `file`. Raises OutputLost."""
    file = file or sys.stdout
    if file is not None:  # None: the process was started without one
        with _guarded(file):
            file.flush()


def note(text: str) -> None:
    """Print to standard error, wrapped on a terminal; if it takes nothing, that is ignored."""
    with contextlib.suppress(OSError):
        columns = width() if sys.stderr is not None and sys.stderr.isatty() else None
        print("\n".join(wrapped(text, columns)) if columns else text, file=sys.stderr, flush=True)


def reserve() -> TextIO:
    """Return standard output as a file of our own; everything else that is written there reaches standard error.

    That includes writers that know only the file descriptor, such as C code and child processes. It holds for the
    rest of the process: imported modules may print when the interpreter exits.
    """
    try:
        number = sys.stdout.fileno()
        sys.stdout.flush()
        ours = os.fdopen(os.dup(number), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    except (AttributeError, OSError, ValueError):  # none at all, or a stand-in without a descriptor
        return sys.stdout
    try:
        os.dup2(2, number)
    except OSError:  # standard error is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return ours


@contextlib.contextmanager
def _guarded(file: TextIO) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        raise OutputLost(error) from None


def width() -> int:
    """Return the columns for a report on standard output: the terminal's (or COLUMNS), else `NO_TERMINAL`."""
    columns = shutil.get_terminal_size((NO_TERMINAL, 24)).columns or NO_TERMINAL
    return min(max(columns, 60), 120)  # less has no room for a module's name, more is hard to read


def wrapped(text: str, columns: int, first: str = "", rest: str = "  ") -> list[str]:
    """Return the text in lines of at most `columns`. Longer words (paths, names) stay whole, to be copied."""
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]
