"""The first sign of life where logging shows none: one line on standard error.

Python shows no INFO message unless it is asked to, so most runs would not see that they are patched. A WARNING is
lost where a configuration has disabled the loggers that it does not name, as that of `dictConfig` does by default.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Any

from .._version import __version__
from .edges import say


class FirstSign:
    """Says once in a process, on rank 0, that patches are applied, or at exit that none was.

    Args:
        log: the logger whose INFO messages make the line superfluous, if a handler takes them.
        quiet: whether nothing is ever said.
    """

    def __init__(self, log: logging.Logger, quiet: bool) -> None:
        self._log, self._done, self._warned = log, quiet, quiet

    def hush(self) -> None:
        """Say nothing from now on: the command line has reports of its own."""
        self._done = self._warned = True

    def is_heard(self) -> bool:
        """Return whether the INFO message of what was applied is for this process, and a handler takes it.

        Megatron sets up logging late: the message waits for that.
        """
        return _takes(self._log, logging.INFO) and _place()[0] == 0

    def applied(self) -> None:
        """Say that patches are applied: not how many, as there will be more."""
        self._say(f"megapatch {__version__} applies patches; print(megapatch.report()) lists them")

    def not_in_place(self, problem: str) -> None:
        """Say the first problem of a patch, where no handler shows the WARNING that was logged."""
        if not self._warned and not _takes(self._log, logging.WARNING):
            self._warned = True
            self._say_on_rank_0(f"megapatch {__version__}: {problem}; print(megapatch.report()) lists all patches")

    def watch_exit(self) -> None:
        """At exit, say if this process has imported Megatron and no patch was applied in it: a driver does not."""
        atexit.register(self._none_applied, os.getpid())

    def _none_applied(self, started_in: int) -> None:
        if sys.modules.keys() >= {"torch", "megatron.core"} and os.getpid() == started_in:
            self._say(f"megapatch {__version__} applied no patch in this process; `megapatch doctor` says why")

    def _say(self, text: str) -> None:
        if not self._done:
            self._done = True
            if not _takes(self._log, logging.INFO):
                self._say_on_rank_0(text)

    def _say_on_rank_0(self, text: str) -> None:
        rank, size = _place()
        is_one_of_many = size == 1 and _has_parent()  # whose ranks nobody knows yet
        if rank == 0 and not is_one_of_many:
            say(text)


def _takes(log: logging.Logger, level: int) -> bool:
    """Return whether a message of this level reaches a handler that shows it."""
    if not log.isEnabledFor(level):
        return False
    handlers: list[logging.Handler] = []
    logger: logging.Logger | None = log
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    last = [logging.lastResort] if logging.lastResort is not None and not handlers else []
    return any(
        handler.level <= level for handler in (*handlers, *last) if not isinstance(handler, logging.NullHandler)
    )


def _place() -> tuple[int, int]:
    """Return rank and number of ranks as launchers have it; -1 for a process that a rank has started by itself."""
    from .._ranks import place  # most processes come here late, if at all

    rank, size, _ = place()
    return (-1 if _has_parent() and _began_with_a_rank() else rank), size


def _began_with_a_rank() -> bool:
    """Return whether the environment in which this process began names a rank: that of its parent, if it has one.

    A rank that multiprocessing has started sets the variables itself. Without /proc nobody knows.
    """
    from .._ranks import RANKS

    try:
        with open("/proc/self/environ", "rb") as began_with:
            names = {variable.partition(b"=")[0].decode() for variable in began_with.read().split(b"\0")}
    except (OSError, UnicodeDecodeError):
        return False
    return not names.isdisjoint(RANKS)


def _has_parent() -> bool:
    """Return whether multiprocessing has started this process, such as a data loader's worker."""
    process: Any = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None
