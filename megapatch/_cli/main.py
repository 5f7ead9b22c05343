# PYTHON_ARGCOMPLETE_OK
"""The command line: megapatch doctor | verify | audit | list | explain | run | demo"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib import import_module

from .._engine.engine import this_process
from .._reporting import terminal
from .parser import CANNOT_WRITE, INTERRUPTED, READER_HAS_GONE, make_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    this_process().first_sign.hush()
    try:
        try:
            return _run(arguments)
        finally:
            terminal.flush()
    except terminal.OutputLost as lost:
        if lost.reader_has_gone:
            return READER_HAS_GONE
        terminal.note(f"megapatch: the output cannot be written: {lost}")
        return CANNOT_WRITE
    except KeyboardInterrupt:
        terminal.note("interrupted")
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        try:
            import_module("argcomplete").autocomplete(parser)
        except ImportError:
            return 1  # the shell's Python has it, and this one has not: run nothing
    options, others = parser.parse_known_args(arguments)
    if others:
        options.parser.error(f"unrecognized arguments: {' '.join(others)}")
    if reason := _no_temporary_files(options):
        terminal.note(reason)
        return CANNOT_WRITE
    code: int = options.run(options)
    return code


def _no_temporary_files(options: argparse.Namespace) -> str | None:
    """Say why a command that runs Megatron, which makes temporary files, cannot do so here; None if it can."""
    imports = options.command == "doctor" and not (options.no_import or options.folder)  # torch makes files then
    if not (options.command in ("demo", "verify") or imports):
        return None
    import tempfile

    try:
        tempfile.gettempdir()  # writes a file, as a full disk has folders, too
    except OSError as error:
        return (
            f"megapatch {options.command} needs a folder for temporary files: expected one that can be written "
            f"to, with space left, found none ({error.strerror}). Set TMPDIR to one, as in TMPDIR=/scratch "
            "megapatch ..."
        )
    return None
