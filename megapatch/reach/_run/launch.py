"""`megapatch run`: become a command, with megapatch in the environment of every process that it starts."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

from ..._engine.engine import this_process
from .out_of_reach import SHELLS, of_command, of_script
from .site.sitecustomize import HERE, TARGETS, say

BAD_USAGE, CANNOT_START, NOT_FOUND = 2, 126, 127  # the last two as shells have them


def launch(command: list[str]) -> int:
    """Become the command: same process, standard streams, arguments and working directory.

    Returns an exit code if there is no command or it cannot be started, and says why on standard error.
    """
    if not command or not command[0]:
        say("there is no command. Give a command after `--`, as in: megapatch run -- torchrun train.py")
        return BAD_USAGE
    if os.pathsep in HERE:
        say(f"megapatch is in {HERE}; PYTHONPATH cannot hold a folder with {os.pathsep} in its name. Move it.")
        return BAD_USAGE
    targets = {module for record in this_process().records for module in record.modules}
    for warning in warnings(command):
        say(warning)
    sys.stdout.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the command would inherit that
        with suppress(AttributeError):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, reaching(os.environ, targets))
    except (FileNotFoundError, NotADirectoryError):
        found = shutil.which(command[0])
        say(
            f"{found} cannot be started: the interpreter in its first line does not exist."
            if found
            else f"{command[0]}: no such command. Give a program on PATH, or its path."
        )
        return NOT_FOUND
    except (OSError, ValueError) as error:
        say(f"{command[0]} cannot be started: {error}. A script is started by its interpreter: bash {command[0]}")
        return CANNOT_START


def reaching(environment: Mapping[str, str], targets: set[str]) -> dict[str, str]:
    """Return the environment in which every Python imports megapatch when it imports one of the targets."""
    before = environment.get("PYTHONPATH")
    others = [folder for folder in before.split(os.pathsep) if folder != HERE] if before else []
    return {**environment, "PYTHONPATH": os.pathsep.join([HERE, *others]), TARGETS: ",".join(sorted(targets))}


def warnings(command: list[str]) -> list[str]:
    """Return warnings about processes that the command puts out of reach.

    Reads the script that the command names, but not those called there.
    """
    return of_command(command) + of_script(*_script(command))


def _script(command: list[str]) -> tuple[str, str]:
    """Return the text and the path of the shell script that the command names; the text is empty without one."""
    words = iter(command)
    if any(os.path.basename(word) in SHELLS for word in words):
        file = next(filter(os.path.isfile, words), "")
    else:
        file = shutil.which(command[0]) or ""
        first = _text(file, 256).partition("\n")[0]
        if first[:2] != "#!" or not any(os.path.basename(word) in SHELLS for word in first[2:].split()):
            return "", file
    return _text(file), file


def _text(file: str, characters: int = -1) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as opened:
            return opened.read(characters)
    except OSError:
        return ""
