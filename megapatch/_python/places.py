"""Where in the user's code something happens, at a price that a step can pay."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_TORCH = f"{os.sep}torch{os.sep}"
_MEGATRON, _CORE = f"{os.sep}megatron{os.sep}", f"{os.sep}core{os.sep}"
_FRAMES = 6


class Line(NamedTuple):
    """A line of the user's code that is under way."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.number} in {self.code.co_name}"


def user_lines() -> tuple[Line, ...]:
    """Return the lines that are neither Megatron's, torch's nor ours, innermost first.

    In a backward pass there may be none.
    """
    found: list[Line] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        if not is_machinery(frame.f_code.co_filename):
            found.append(Line(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def user_line() -> str:
    """Return the innermost of these lines in words."""
    return str(next(iter(user_lines()), "an unknown line"))


def in_words(lines: tuple[Line, ...]) -> tuple[str, ...]:
    """Return lines ``file:line in function``, outermost first."""
    return tuple(map(str, reversed(lines)))


def is_machinery(filename: str) -> bool:
    """Return whether a file is Megatron's, torch's, ours, or none. By its text: each frame of a step is asked."""
    return filename.startswith(("<", _OURS)) or _TORCH in filename or (_MEGATRON in filename and _CORE in filename)
