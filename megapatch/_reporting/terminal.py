"""The printer of the command line: standard output and standard error, tables, JSON documents and exit codes.

Everything that it prints goes through `write`, `write_json` and `note`, and is cleaned there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from .._printable import clean, clean_data, cut, first_line_at_the_margin, one_line

NO_TERMINAL = 100

SCHEMA = 1
"""Version of the layout of JSON documents. It grows when a key is removed or changes its meaning, not when one is
added."""

WELL, NOT_WELL, COULD_NOT_LOOK, INTERRUPTED, READER_HAS_GONE = 0, 1, 2, 130, 141
"""Exit codes of all commands."""


class OutputLost(Exception):
    """Standard output takes no more: its reader has gone, or the disk is full.

    The file leads nowhere from now on, so that the interpreter's last flush is quiet.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.reader_has_gone = isinstance(error, BrokenPipeError)


def write(text: str = "", end: str = "\n", file: TextIO | None = None) -> None:
    """Print to standard output, or to `file`. Raises OutputLost."""
    _print(clean(text), end, file)


def write_json(data: Any, file: TextIO | None = None) -> None:
    """Print data as JSON to standard output, or to `file`. Raises OutputLost."""
    _print(as_json(data), "\n", file)


def document(**parts: Any) -> dict[str, Any]:
    """Return the parts as one JSON-ready document that begins with its ``schema``; `as_json` cleans it."""
    return {"schema": SCHEMA, **parts}


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun, such as ``1 patch``; `nouns` is a plural that is not one letter more."""
    return f"{number} {noun if number == 1 else nouns or f'{noun}s'}"


def table(
    rows: Sequence[Sequence[str]], columns: int | None = None, indent: str = "", widest: int | None = None
) -> list[str]:
    """Return lines with the cells of each row side by side.

    Args:
        rows: all of one length.
        columns: where to wrap the last cell; None for nowhere.
        indent: what lines begin with.
        widest: a first cell that is longer has a line of its own.
    """
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if widest is not None and rows:
        widths[0] = max((len(first) for first, *_ in rows if len(first) <= widest), default=0)
    lines = []
    for row in rows:
        if len(row[0]) > widths[0]:
            lines.append(f"{indent}{row[0]}")
            row = ["", *row[1:]]
        first = indent + "".join(f"{cell:{width}}  " for cell, width in zip(row[:-1], widths, strict=False))
        lines += wrapped(row[-1], columns, first, " " * len(first)) if columns else [(first + row[-1]).rstrip()]
    return lines


def _print(text: str, end: str, file: TextIO | None) -> None:
    file = file or sys.stdout
    if file is None:  # as after `>&-`: print() would do nothing, and the command seem to have worked
        raise OutputLost(OSError(errno.EBADF, "standard output is closed"))
    with _guarded(file):
        print(_for(file, text), end=end, file=file)


def _for(file: TextIO, text: str) -> str:
    """Return text that a file's encoding has, such as ASCII; other characters are escaped."""
    encoding = file.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def as_json(data: Any) -> str:
    """Return data as JSON without secrets and control characters; json.dumps leaves DEL as it is."""
    return json.dumps(clean_data(data), indent=2).replace("\x7f", "\\u007f")


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
        lines = "\n".join(wrapped(text, columns)) if columns else first_line_at_the_margin(text)
        print(lines, file=sys.stderr, flush=True)


def progress(text: str) -> None:
    """Show a line on standard error in place of the last one, or of nothing with ""; only on a terminal."""
    with contextlib.suppress(OSError):
        if sys.stderr is not None and sys.stderr.isatty():
            columns = width() - 1
            print(f"\r{cut(text, columns):{columns}}\r", end="", file=sys.stderr, flush=True)


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


def columns_of_a_terminal() -> int | None:
    """Return the columns to wrap standard output at; None where it is not a terminal: a line is a line there."""
    return width() if sys.stdout is not None and sys.stdout.isatty() else None


def width() -> int:
    """Return the columns for a report on standard output: the terminal's (or COLUMNS), else `NO_TERMINAL`."""
    columns = shutil.get_terminal_size((NO_TERMINAL, 24)).columns or NO_TERMINAL
    return min(max(columns, 60), 120)  # less has no room for a module's name, more is hard to read


def wrapped(text: str, columns: int, first: str = "", rest: str = "  ") -> list[str]:
    """Return cleaned text in lines of at most `columns`. Longer words (paths, names) stay whole, to be copied."""
    return textwrap.wrap(
        clean(text),
        columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def fill(text: str, columns: int, first: str = "", rest: str = "", file: TextIO | None = None) -> None:
    """Print text in lines of at most `columns`. Raises OutputLost."""
    write("\n".join(wrapped(text, columns, first, rest)), file=file)
