"""Find processes that `megapatch run` cannot reach, as far as command lines, environments and scripts show it.

Uses only the standard library: sitecustomize loads this file where megapatch may not be installed. `here` is the
folder that `megapatch run` puts on PYTHONPATH. Functions that begin with `of_` return messages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

SHELLS = ("sh", "bash", "dash", "ksh", "zsh")

REPLACED, DROPPED = "replaced", "dropped"
_OFF = {
    REPLACED: "megapatch is not active there. Keep the old value, as in PYTHONPATH=/new:$PYTHONPATH.",
    DROPPED: "megapatch is not active there. Pass on PYTHONPATH and MEGAPATCH_RUN_TARGETS, as in "
    'env -i PYTHONPATH="$PYTHONPATH" MEGAPATCH_RUN_TARGETS="$MEGAPATCH_RUN_TARGETS" python.',
}
_DEEDS = {REPLACED: "sets PYTHONPATH without $PYTHONPATH in it", DROPPED: "drops PYTHONPATH"}
_IGNORED = "with {} Python ignores PYTHONPATH or sitecustomize, so megapatch is not active there. Drop the option."
_JOB = (
    'Give its runtime env "worker_process_setup_hook": "megapatch.activate" (its workers need megapatch '
    "installed), or use megapatch.reach.ray.runtime_env in the driver; with slime, pass "
    "--custom-megatron-init-path megapatch.activate."
)

_DECLARING = ("export", "declare", "typeset", "local", "readonly")
_STARTING = (
    "env",
    "sudo",
    "nohup",
    "nice",
    "ionice",
    "setsid",
    "stdbuf",
    "timeout",
    "time",
    "numactl",
    "taskset",
)
_KEYWORDS = ("if", "then", "elif", "else", "while", "until", "do", "!", "{", "time", "exec", "command", "builtin")

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r]|\\\r?\n)+)
      | (?P<comment>\#[^\n]*)
      | <<-?[ \t]*\\?['"]?(?P<document>\w+)['"]?
      | (?P<redirect>&>+|[<>]+&?)
      | (?P<end>[;&|()\n]+)
      | (?P<word>(?:[^\s'"\\;&|()<>`$]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|`[^`]*`|\$\((?:[^()]|\([^()]*\))*\)|\$)+)
      | (?P<stray>.)""",
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)""", re.DOTALL)
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_IN_JSON = re.compile(r"""\bPYTHONPATH(\\*["'])\s*:\s*(\\*["'])(.*?)\2""")
_PYTHON = re.compile(r"(python|pypy)[\d.]*t?w?|\$\{?\w*PYTHON\w*(:?-.*)?\}?")


class Finding(NamedTuple):
    """One thing that keeps megapatch out: `REPLACED`, `DROPPED`, or an option of Python; and its line."""

    kind: str
    line: int


# ------------------------------------------------------------------------------------------ messages
def of_process(command: object, environment: Mapping[str, str] | None, here: str) -> list[str]:
    """Say why a process that ``subprocess.Popen(command, env=environment)`` starts does not import megapatch.

    Silent about programs that are not Python and probably do not start one: clearing the environment of git, for
    example, does no harm.
    """
    if isinstance(command, (str, bytes, os.PathLike)):
        text = os.fsdecode(command)
    elif isinstance(command, (list, tuple)):  # not an iterator, which this would use up
        text = _quoted(os.fsdecode(word) for word in command)
    else:
        return []
    simple = list(_commands(text))
    words = [_plain(word) for _, found in simple for word in found]
    in_shell = isinstance(command, (str, bytes)) or os.path.basename(words[0]) in (*SHELLS, *_STARTING)
    programs = words if in_shell else words[:1]
    python = any(map(is_python, programs))
    path = os.fsdecode((os.environ if environment is None else environment).get("PYTHONPATH") or "")
    shown = _shortened(words)
    if here not in path.split(os.pathsep) and (python or (path and any(map(_starts_others, programs)))):
        held = f"PYTHONPATH={path}" if path else "no PYTHONPATH"
        return [f"`{shown}` with {held}: {_OFF[REPLACED]}"]
    interpreter = [] if isinstance(command, str) else _interpreter(words[0])
    for kind, _ in findings(f"{_quoted(interpreter)} {text}" if interpreter else text, here):
        if kind in _OFF:
            does = "replaces" if kind == REPLACED else "drops"
            return [f"`{shown}`, which {does} PYTHONPATH: {_OFF[kind]}"]
        return [f"`{shown}`: {_IGNORED.format(kind)}"]
    return []


def of_command(words: Sequence[str]) -> list[str]:
    """Say how the command of `megapatch run` itself keeps megapatch out."""
    return of_script(_quoted([*_interpreter(words[0]), *words]), "the command")


def of_ray_job(command: Sequence[str], here: str) -> list[str]:
    """Say that the workers of a `ray job submit` that does not mention megapatch are out of reach, and why."""
    if "job" not in command or not any(os.path.basename(word) == "ray" for word in command):
        return []
    text = " ".join(command)
    if "worker_process_setup_hook" in text or "megapatch.activate" in text:
        return []
    replaces = any(kind == REPLACED for kind, _ in findings(_quoted(command), here))
    why = "its runtime env replaces PYTHONPATH" if replaces else "the cluster starts it, not this command"
    return [f"the job of this `ray job submit` is out of reach: {why}. {_JOB}"]


def of_script(text: str, name: str) -> list[str]:
    """Find lines of a shell script that keep megapatch out; the messages call the script `name`."""
    lines: dict[str, list[str]] = {}
    for kind, line in sorted(set(findings(text)), key=lambda finding: finding.line):
        lines.setdefault(kind, []).append(str(line))
    messages = []
    for kind, numbers in lines.items():
        where = f"(line {', '.join(numbers)})"
        if kind in _OFF:
            job = f" A Ray job: {_JOB[0].lower()}{_JOB[1:]}" if kind == REPLACED and "job submit" in text else ""
            messages.append(f"{name} {_DEEDS[kind]} {where}: {_OFF[kind]}{job}")
        else:
            messages.append(f"{name} starts a Python {where}: {_IGNORED.format(kind)}")
    return messages


def _shortened(words: Iterable[str]) -> str:
    """Return the first words, whole ones: the printing code hides secrets, and must see each in full."""
    shown = ""
    for word in words:
        if len(shown) + len(word) > 80 and shown:
            return f"{shown} ..."
        shown += f"{' ' * bool(shown)}{word}"
    return shown


# ------------------------------------------------------------------------------------------ what a shell would do
def findings(text: str, here: str = "$PYTHONPATH") -> Iterator[Finding]:
    """Yield the effects of lines of shell on PYTHONPATH and on Python, in commands and in JSON."""
    kept = {"PYTHONPATH"}  # variables that hold the old value
    for line, words in _commands(text):
        for kind in _of_words(words, kept, here):
            yield Finding(kind, line)
    for match in _IN_JSON.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        if text.splitlines()[number - 1].lstrip()[:1] != "#" and not _keeps(match[3], kept, here):
            yield Finding(REPLACED, number)


def _of_words(words: list[str], kept: set[str], here: str) -> Iterator[str]:
    """Yield the effects of one simple command. Its words are as they were written, with their quotes."""
    assigns = "unquoted"  # whether NAME=value is an assignment here: "", or "quoted" as well, for env and sudo
    for number, written in enumerate(words, 1):
        word = _plain(written)
        assignment = _ASSIGNMENT.fullmatch(word if assigns == "quoted" else written)
        if assignment and assigns:
            if _keeps(written, kept, here):
                kept.add(assignment[1])
            elif assignment[1] == "PYTHONPATH" and not assignment[2]:
                yield REPLACED
            continue
        yield from _of_program(word, words[number:])
        if is_python(word):
            return
        if os.path.basename(word) == "env" or word in ("sudo", *_DECLARING):
            assigns = "quoted"
        elif word not in _KEYWORDS and assigns == "unquoted":
            assigns = ""


def _of_program(word: str, rest: list[str]) -> Iterator[str]:
    """Yield the effects of a program, or of a shell's builtin, that gets the rest of the words."""
    if os.path.basename(word) == "env":
        yield from _of_env(rest)
    elif is_python(word):
        flag = _ignoring_flag(map(_plain, rest))
        if flag:
            yield flag
    elif "PYTHONPATH" in map(_plain, rest):
        no_longer_exports = word in _DECLARING and {"-n", "+x"} & set(rest)
        if no_longer_exports or (word == "unset" and "-f" not in rest):
            yield DROPPED


def _of_env(rest: list[str]) -> Iterator[str]:
    """Yield DROPPED if `env` starts a Python, or a program that may start one, without PYTHONPATH."""
    dropped = False
    words = map(_plain, rest)
    for word in words:
        if word in ("-u", "--unset"):
            dropped |= next(words, "") == "PYTHONPATH"
        elif word in ("-", "--ignore-environment", "-uPYTHONPATH", "--unset=PYTHONPATH"):
            dropped = True
        elif word[:1] == "-":
            dropped |= word[1:2] != "-" and "i" in word.partition("S")[0]
        elif word.startswith("PYTHONPATH="):
            return  # set again, which is judged as an assignment
        elif "=" not in word:
            if dropped and (is_python(word) or word[:1] == "$" or _starts_others(word)):
                yield DROPPED
            return


def _keeps(word: str, kept: Iterable[str], here: str) -> bool:
    """Return whether a word, with its quotes, holds the old value of PYTHONPATH."""
    expanded = re.sub(r"'[^']*'", "", word)
    names = "|".join(map(re.escape, kept))
    return re.search(rf"\$\{{?(?:{names})(?!\w)", expanded) is not None or (here[:1] != "$" and here in word)


def _commands(text: str, first: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Yield the simple commands in lines of shell: line number and words, with their quotes.

    Those in `$(...)`, and in the text after `bash -c` or `eval`, come as well.
    """
    words: list[str] = []
    documents: list[str] = []
    position, line, begun = 0, first, first
    while position < len(text):
        match = _TOKEN.match(text, position)
        assert match is not None  # the last alternative takes any character
        position = match.end()
        if match["document"]:
            documents.append(match["document"])
        elif match["word"]:
            begun = begun if words else line
            words.append(match[0])
        elif match["end"]:
            if words:
                yield begun, words
                yield from _inside(words, begun)
                words = []
            if documents and "\n" in match[0]:
                body = re.compile(rf"(.*?)^[ \t]*{documents.pop(0)}[ \t]*$|.*", re.DOTALL | re.MULTILINE)
                found = body.match(text, position)
                assert found is not None
                yield from _commands(found[1] or found[0], line + match[0].count("\n"))
                position = found.end()
        line = first + text.count("\n", 0, position)
    if words:
        yield begun, words
        yield from _inside(words, begun)


def _inside(words: list[str], line: int) -> Iterator[tuple[int, list[str]]]:
    plain = [_plain(word) for word in words]
    for number, word in enumerate(words):
        for inner in re.findall(r"\$\(((?:[^()]|\([^()]*\))*)\)|`([^`]*)`", re.sub(r"'[^']*'", "", word)):
            yield from _commands(inner[0] or inner[1], line)
        before = plain[:number]
        runs = before and re.fullmatch(r"-\w*c", before[-1]) and any(os.path.basename(w) in SHELLS for w in before)
        splits = "env" in map(os.path.basename, before) and before[-1] in ("-S", "--split-string")
        if runs or splits or (plain[0] == "eval" and number):
            yield from _commands(plain[number], line)


def _plain(word: str) -> str:
    """Return a word without its quotes."""
    return _QUOTED.sub(lambda match: next((part for part in match.groups() if part is not None), ""), word)


def _quoted(words: Iterable[str]) -> str:
    """Return words that no shell has to read as the line that would give them."""
    return " ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in words)


# ------------------------------------------------------------------------------------------ programs
def is_python(word: str) -> bool:
    return _PYTHON.fullmatch(os.path.basename(word)) is not None


def _starts_others(word: str) -> bool:
    """Return whether this is a shell, or a script that names its interpreter, such as torchrun."""
    return os.path.basename(word) in SHELLS or bool(_interpreter(word))


def _interpreter(word: str) -> list[str]:
    """Return the words of a script's first line; none if this is not a script."""
    folders = [""] if os.path.dirname(word) else os.get_exec_path()
    for file in (os.path.join(folder, word) for folder in folders):
        if os.path.isfile(file):
            with open(file, "rb") as opened:
                first = opened.readline(256)
            return os.fsdecode(first[2:]).split() if first[:2] == b"#!" else []
    return []


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
