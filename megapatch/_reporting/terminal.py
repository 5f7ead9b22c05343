"""Text that fits the terminal."""

from __future__ import annotations

import shutil
import textwrap

NO_TERMINAL = 100


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
