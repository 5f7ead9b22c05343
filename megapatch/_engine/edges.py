"""Guards where the code of others runs inside ours."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Iterator

from .._version import see

log = logging.getLogger("megapatch")

APPLIED = "megapatch applied %s"
"""The one message of a run in which all is well."""


def clean_record(record: logging.LogRecord) -> bool:
    """Log filter: clean a message and its traceback."""
    if record.msg is APPLIED:
        return True  # with names of patches and loaded modules alone
    from .._printable import clean_record  # most processes log nothing else

    return clean_record(record)


def is_the_command(*words: str) -> bool:
    """Return whether this process is `megapatch WORDS ...`; `python -m megapatch` calls it "-m" at first."""
    name, *others = getattr(sys, "argv", None) or [""]
    by_module = name == "-m" and ("-m", "megapatch") in itertools.pairwise(sys.orig_argv)
    return (by_module or os.path.basename(name) == "megapatch") and others[: len(words)] == [*words]


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
