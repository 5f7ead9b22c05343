"""Where in the user's code something happens, at a price that a step can pay."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType

Stack = tuple[tuple[CodeType, int], ...]
"""Frames of the user's code, innermost first: the code and the number of the line."""

_OURS = (f"{Path(__file__).resolve().parent.parent}{os.sep}", "<")
_TORCH, _MEGATRON, _CORE = (f"{os.sep}{name}{os.sep}" for name in ("torch", "megatron", "core"))
_FRAMES = 6


def user_stack() -> Stack:
    """Return the frames that are neither Megatron's, torch's nor ours; in a backward pass there may be none."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        if not is_machinery(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def in_words(stack: Stack) -> tuple[str, ...]:
    """Return lines ``file:line in function``, outermost first."""
    return tuple(f"{code.co_filename}:{line} in {code.co_name}" for code, line in reversed(stack))


def is_machinery(filename: str) -> bool:
    """Return whether a file is Megatron's, torch's, ours, or none. By its text: each frame of a step is asked."""
    return filename.startswith(_OURS) or _TORCH in filename or (_MEGATRON in filename and _CORE in filename)
