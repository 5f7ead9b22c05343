"""A line that shows that something long is still running."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from .._reporting import terminal

DOT_EVERY = 5.0
"""Seconds between two dots where the output is not a terminal."""


@contextlib.contextmanager
def heartbeat(text: str) -> Iterator[None]:
    """Print the text, keep it alive while the block runs, and end the line with the seconds that it took.

    On a terminal the seconds count up; elsewhere a dot is added every `DOT_EVERY` seconds. If the
    block raises, the line ends there.
    """
    started = time.monotonic()
    done = threading.Event()
    on_terminal = sys.stdout is not None and sys.stdout.isatty()

    def beat() -> None:
        with contextlib.suppress(terminal.OutputLost):  # the main thread's next line finds out
            while not done.wait(1.0 if on_terminal else DOT_EVERY):
                seconds = f"{time.monotonic() - started:.0f} s"
                terminal.write(f"{text} {seconds}" if on_terminal else ".", end="", over=on_terminal)
                terminal.flush()

    terminal.write(text, end="")
    terminal.flush()
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    ending = ""
    try:
        yield
        ending = f" {time.monotonic() - started:.0f} s"
    finally:
        done.set()
        thread.join()
        again = on_terminal and bool(ending)
        terminal.write(f"{text}{ending}" if again else ending, over=again)
