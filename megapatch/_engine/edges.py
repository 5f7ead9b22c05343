"""Guards where the code of others runs inside ours, or interrupts it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

from .._version import see

log = logging.getLogger("megapatch")

_TAKES_MORE = 4  # inspect.CO_VARARGS, of a module that few processes need


def clean_record(record: logging.LogRecord) -> bool:
    """Log filter: clean a message and its traceback."""
    from .._printable import clean_record  # many processes log nothing

    return clean_record(record)


def is_the_command(*words: str) -> bool:
    """Return whether this process is `megapatch WORDS ...`; `python -m megapatch` calls it "-m" at first."""
    name, *others = getattr(sys, "argv", None) or [""]
    by_module = name == "-m" and ("-m", "megapatch") in itertools.pairwise(sys.orig_argv)
    return (by_module or os.path.basename(name) == "megapatch") and others[: len(words)] == [*words]


def warn_of_a_setting(problem: str) -> None:
    """Log what is wrong with the environment; `megapatch doctor` says it at its end."""
    if not is_the_command("doctor"):
        log.warning("%s" + see("settings"), problem)


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
    except Exception as error:
        if comes_from_outside(error):
            raise
        log.warning("patches could not be considered" + see("not-considered"), exc_info=True)


def comes_from_outside(error: BaseException) -> bool:
    """Return whether the exception has nothing to do with the code that it interrupted.

    That is Ctrl-C; whatever a signal handler raises, such as the SystemExit of SIGTERM; and an exception that
    another thread has sent, by which func_timeout and stopit end a call. The SystemExit of the code itself, as an
    argument parser raises it, is its failure.
    """
    return isinstance(error, KeyboardInterrupt) or _has_handler(error.__traceback__) or _was_sent(error)


def _has_handler(traceback: TracebackType | None) -> bool:
    """Return whether a frame is that of a signal handler: called with a number and the frame that it interrupted.

    Which handlers are installed now does not say it: a usual one first sets its signal back to the default.
    """
    interrupted = None
    while traceback is not None:
        arguments = _arguments(traceback.tb_frame)
        if any(type(number) is int and frame is interrupted for number, frame in itertools.pairwise(arguments)):
            return True
        interrupted, traceback = traceback.tb_frame, traceback.tb_next
    return False


def _arguments(frame: FrameType) -> list[object]:
    code = frame.f_code
    found: list[object] = []
    last = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & _TAKES_MORE)
    for name in code.co_varnames[:last]:
        value = frame.f_locals.get(name)
        found += value if type(value) is tuple else [value]
    return found


def _was_sent(error: BaseException) -> bool:
    """Return whether PyThreadState_SetAsyncExc has raised this, which makes an exception of a class.

    So it has no arguments, and no statement that raises is where it begins. C code raises a few such.
    """
    import opcode  # only a failure costs it

    traceback = error.__traceback__
    if error.args or traceback is None or isinstance(error, (StopIteration, StopAsyncIteration, MemoryError)):
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    instruction = opcode.opname[traceback.tb_frame.f_code.co_code[traceback.tb_lasti]]
    return instruction not in ("RAISE_VARARGS", "RERAISE")
