"""The first sign of life where logging shows none: one line on standard error.

Python shows no INFO message unless it is asked to, so most runs would not see that they are patched.
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
        self._log, self._done = log, quiet

    def hush(self) -> None:
        """Say nothing from now on: the command line has reports of its own."""
        self._done = True

    def applied(self) -> None:
        """Say that patches are applied: not how many, as there will be more."""
        self._say(f"megapatch {__version__} applies patches; print(megapatch.report()) lists them")

    def watch_exit(self) -> None:
        """At exit, say if this process has imported Megatron and no patch was applied in it: a driver does not."""
        atexit.register(self._none_applied, os.getpid())

    def _none_applied(self, started_in: int) -> None:
        if sys.modules.keys() >= {"torch", "megatron.core"} and os.getpid() == started_in and not _has_parent():
            self._say(f"megapatch {__version__} applied no patch in this process; `megapatch doctor` says why")

    def _say(self, text: str) -> None:
        if self._done:
            return
        self._done = True
        from .._ranks import place  # most processes come here late, if at all

        rank, size, _ = place()
        is_one_of_many = size == 1 and _has_parent()  # whose ranks nobody knows yet
        if not _takes_info(self._log) and rank == 0 and not is_one_of_many:
            say(text)


def _takes_info(log: logging.Logger) -> bool:
    """Return whether an INFO message reaches a handler."""
    if not log.isEnabledFor(logging.INFO):
        return False
    logger: logging.Logger | None = log
    while logger is not None:
        if any(handler.level <= logging.INFO for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _has_parent() -> bool:
    """Return whether multiprocessing has started this process, such as a data loader's worker."""
    process: Any = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None
