"""Find what `megapatch run` cannot reach, as far as command lines, environments and scripts show it.

Uses only the standard library: sitecustomize loads this file where megapatch may not be installed. `here` is the
folder that `megapatch run` puts on PYTHONPATH. Each function returns a list with one message, or an empty list.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

SHELLS = ("sh", "bash", "dash", "ksh", "zsh")

_OFF = "megapatch is not active there. Keep the old value, as in PYTHONPATH=/new:$PYTHONPATH."
_JOB = (
    'Give its runtime env "worker_process_setup_hook": "megapatch.activate" (its workers need megapatch '
    "installed), or use megapatch.reach.ray.runtime_env in the driver; with slime, pass "
    "--custom-megatron-init-path megapatch.activate."
)


def of_process(command: object, environment: Mapping[str, str] | None, here: str) -> list[str]:
    """Say why a process that ``subprocess.Popen(command, env=environment)`` starts does not import megapatch.

    Silent about programs that are not Python and probably do not start one: clearing the environment of git, for
    example, does no harm.
    """
    if isinstance(command, (str, bytes, os.PathLike)):
        words = os.fsdecode(command).split()
    elif isinstance(command, (list, tuple)):  # not an iterator, which this would use up
        words = [os.fsdecode(word) for word in command]
    else:
        return []
    text = " ".join(words)
    in_shell = isinstance(command, (str, bytes)) or os.path.basename(words[0]) in SHELLS
    programs = text.split() if in_shell else words[:1]
    python = any(map(is_python, programs))
    path = os.fsdecode((os.environ if environment is None else environment).get("PYTHONPATH") or "")
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    if here not in path.split(os.pathsep) and (python or (path and any(map(_starts_others, programs)))):
        held = f"PYTHONPATH={path}" if path else "no PYTHONPATH"
        return [f"`{shown}` with {held}: {_OFF}"]
    if replaces(text, here) or drops(text):
        return [f"`{shown}`, which replaces PYTHONPATH: {_OFF}"]
    if python:
        return [f"`{shown}`: {why}" for why in of_flags(text.split() if in_shell else words)]
    return []


def of_flags(words: Iterable[str]) -> list[str]:
    """Say why the first Python in these words, with its options, does not import megapatch."""
    rest = iter(words)
    if not any(map(is_python, rest)):
        return []
    flag = _ignoring_flag(rest)
    if flag is None:
        return []
    return [
        f"with {flag} Python ignores PYTHONPATH or sitecustomize, so megapatch is not active. Drop the option."
    ]


def of_ray_job(command: Sequence[str], here: str) -> list[str]:
    """Say that the workers of a `ray job submit` that does not mention megapatch are out of reach, and why."""
    if "job" not in command or not any(os.path.basename(word) == "ray" for word in command):
        return []
    text = " ".join(command)
    if "worker_process_setup_hook" in text or "megapatch.activate" in text:
        return []
    why = (
        "its runtime env replaces PYTHONPATH"
        if replaces(text, here)
        else "the cluster starts it, not this command"
    )
    return [f"the job of this `ray job submit` is out of reach: {why}. {_JOB}"]


def of_script(text: str, name: str) -> list[str]:
    """Find lines of a shell script that replace PYTHONPATH; the message calls the script `name`."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.lstrip()[:1] != "#"]
    numbers = [str(number) for number, line in lines if replaces(line) or drops(line)]
    if not numbers:
        return []
    where = f"{name} sets PYTHONPATH without $PYTHONPATH in it (line {', '.join(numbers)})"
    return [f"{where}: {_OFF}" + (f" A Ray job: {_JOB[0].lower()}{_JOB[1:]}" if "job submit" in text else "")]


def replaces(text: str, here: str = "$PYTHONPATH") -> bool:
    """Return whether a line of shell or JSON sets PYTHONPATH without keeping the old value or `here`."""
    before, name, after = text.partition("PYTHONPATH")
    while name:
        value = after.lstrip("\\\"'")
        sets = after.startswith("=") or (value != after and value.lstrip().startswith(":"))
        loses = sets and not any(kept in value for kept in ("$PYTHONPATH", "${PYTHONPATH", here))
        whole = not (before[-1:].isalnum() or before[-1:] in ("_", "$", "{"))
        if whole and (loses or before.rstrip().endswith("unset")):
            return True
        before, name, after = after.partition("PYTHONPATH")
    return False


def drops(text: str) -> bool:
    """Return whether `env` in a line of shell starts a Python, or what may start one, without PYTHONPATH."""
    words = iter(text.split())
    if not any(os.path.basename(word) == "env" for word in words):
        return False
    dropped = False
    for word in words:
        if word in ("-u", "--unset"):
            dropped |= next(words, "") == "PYTHONPATH"
        elif word in ("-", "--ignore-environment", "-uPYTHONPATH", "--unset=PYTHONPATH"):
            dropped = True
        elif word[:1] == "-":
            dropped |= word[1:2] != "-" and "i" in word
        elif word.startswith("PYTHONPATH="):
            return False  # set again, and `replaces` judges how
        elif "=" not in word:
            return dropped and (is_python(word) or word[:1] == "$" or _starts_others(word))
    return False


def is_python(word: str) -> bool:
    return os.path.basename(word).startswith("python")


def _starts_others(word: str) -> bool:
    """Return whether this is a shell, or a script that names its interpreter, such as torchrun."""
    if os.path.basename(word) in SHELLS:
        return True
    folders = [""] if os.path.dirname(word) else os.get_exec_path()
    for file in (os.path.join(folder, word) for folder in folders):
        if os.path.isfile(file):
            with open(file, "rb") as opened:
                return opened.read(2) == b"#!"
    return False


def _ignoring_flag(options: Iterator[str]) -> str | None:
    """Return the first option with -I, -E or -S among those of a Python, or None."""
    for word in options:
        if word[:1] != "-" or word == "-":
            return None
        if word == "--check-hash-based-pycs":
            next(options, None)
        if word[:2] == "--":
            continue
        for position, letter in enumerate(word):
            if letter in "IES":
                return word
            if letter in "cm":
                return None
            if letter in "XW":  # its value is the rest of the word, or the next word
                if position == len(word) - 1:
                    next(options, None)
                break
    return None
