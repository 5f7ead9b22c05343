"""Faults at each event in some files, one at a time, as a signal handler or a bug would raise them."""

from __future__ import annotations

import gc
import linecache
import sys

CALLS, LINES = ("call", "return"), ("line", "return")


class Fault:
    """Raises the error at the k-th event in these files.

    Args:
        within: a function; events count only while it runs. None for always.
        once: whether an event counts only the first time.

    Attributes:
        met: where that was; None if there were not so many events.
    """

    def __init__(self, error, events, k, files, within=None, once=False):
        self.error, self.events, self.left, self.files, self.met = error, events, k, files, None
        self.within, self.inside = within and within.__code__, within is None
        self.once, self.seen = once, set()

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename not in self.files:
            return None
        if frame.f_code is self.within and event in ("call", "return"):
            self.inside += 1 if event == "call" else -1
        elif self.inside and event in self.events and not _lets_go(frame, event):
            place = (event, frame.f_code, frame.f_lineno)
            self.left -= not (self.once and place in self.seen)
            self.seen.add(place)
            if self.left < 0:
                sys.settrace(None)
                self.met = f"{event} {frame.f_code.co_name}:{frame.f_lineno}"
                raise self.error
        return self

    def __enter__(self):
        self.before = sys.gettrace()
        gc.disable()  # it would close generators of earlier rounds in here, where what is raised goes nowhere
        sys.settrace(self)

    def __exit__(self, *error):
        sys.settrace(self.before)
        gc.enable()


def _lets_go(frame, event):
    """The end of a `with` or `try`: no interrupt comes between its last line and the lock that it frees."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    text, above = (linecache.getline(file, number).strip() for number in (line, line - 1))
    return event == "line" and (text.startswith("with ") or above == "finally:" or ".release()" in text)
