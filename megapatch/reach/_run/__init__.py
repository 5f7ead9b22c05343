"""`megapatch run`: become a command, with megapatch in the environment of every process that it starts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

from ..._engine.engine import this_process
from ..._reporting.terminal import note
from .site.sitecustomize import HERE, TARGETS

BAD_USAGE, CANNOT_START, NOT_FOUND = 2, 126, 127  # the last two as shells have them

REACH = (
    "every Python below imports megapatch with the first module that it patches, if it inherits PYTHONPATH and "
    f"{TARGETS}. Not reached: python -E, -I and -S, scripts that replace PYTHONPATH, Ray jobs, ssh, containers."
)

OUT_OF_REACH = (
    (
        r"\b(?:python|pypy)[\d.]*t?(?: -[bBdOPqsuvx]+)* -[bBdOPqsuvx]*[EIS]",
        "with -E, -I or -S Python ignores PYTHONPATH or sitecustomize. Drop the option.",
    ),
    (
        r"\benv (?:-\S+ |\S+=\S* )*(?:-i?|--ignore-environment|-u ?PYTHONPATH|--unset=PYTHONPATH) ",
        f"the command drops PYTHONPATH. Pass on PYTHONPATH and {TARGETS}.",
    ),
    (
        r"\bPYTHONPATH=(?!\S*\$\{?PYTHONPATH\b)",
        "the command replaces PYTHONPATH. Keep the old value, as in PYTHONPATH=/new:$PYTHONPATH.",
    ),
    (
        r"\bray job submit\b(?!.*(?:worker_process_setup_hook|megapatch\.activate))",
        'the cluster starts the job. Give its runtime env "worker_process_setup_hook": "megapatch.activate", or '
        "with slime pass --custom-megatron-init-path megapatch.activate.",
    ),
)
"""Signs in the command itself that processes are out of reach, with what to do. Scripts are not read."""


def launch(command: list[str]) -> int:
    """Become the command: same process, standard streams, arguments and working directory.

    Returns an exit code if there is no command or it cannot be started, and says why on standard error.
    """
    if not command or not command[0]:
        _say("there is no command. Give a command after `--`, as in: megapatch run -- torchrun train.py")
        return BAD_USAGE
    if os.pathsep in HERE:
        _say(f"megapatch is in {HERE}; PYTHONPATH cannot hold a folder with {os.pathsep} in its name. Move it.")
        return BAD_USAGE
    engine = this_process()
    targets = {module for record in engine.records for module in record.modules}
    for text in (*([] if engine.settings.quiet else [REACH]), *out_of_reach(command)):
        _say(text)
    sys.stdout.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the command would inherit that
        with suppress(AttributeError):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, reaching(os.environ, targets))
    except OSError as error:
        found = shutil.which(command[0], mode=os.F_OK)
        if found is None:  # whatever the error is: one of PATH's folders may be unreadable
            _say(f"{command[0]}: no such command. Give a program on PATH, or its path.")
            return NOT_FOUND
        if isinstance(error, FileNotFoundError):
            _say(f"{found} cannot be started: the interpreter in its first line does not exist.")
            return NOT_FOUND
        _say(f"{command[0]} cannot be started: {error}. A script is started by its interpreter: bash {command[0]}")
        return CANNOT_START


def reaching(environment: Mapping[str, str], targets: set[str]) -> dict[str, str]:
    """Return the environment in which every Python imports megapatch when it imports one of the targets."""
    before = environment.get("PYTHONPATH")
    others = [folder for folder in before.split(os.pathsep) if folder != HERE] if before else []
    return {**environment, "PYTHONPATH": os.pathsep.join([HERE, *others]), TARGETS: ",".join(sorted(targets))}


def out_of_reach(command: list[str]) -> list[str]:
    """Return a sentence for each sign in the command that megapatch will not be active below it."""
    found = [advice for sign, advice in OUT_OF_REACH if re.search(sign, " ".join(command))]
    return [f"megapatch will not be active: {advice}" for advice in found]


def _say(text: str) -> None:
    note(f"megapatch run: {text}")
