"""Read the tables: which tests a mutation of a file runs, and which mutations change nothing."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path

from .find import Mutation, mutations
from .runs import ROOT

CHOSEN = Path(__file__).parent / "chosen_tests.txt"
EQUIVALENTS = Path(__file__).parent / "equivalents.txt"
PACKAGE = "megapatch"


def files_of(room: str) -> list[str]:
    """Return the paths, from the root, of a room's files; empty if there is no such room."""
    place = ROOT / PACKAGE / room.removeprefix(f"{PACKAGE}/")
    found = [place] if place.is_file() else sorted(place.rglob("*.py"))
    return [path.relative_to(ROOT).as_posix() for path in found if path.suffix == ".py"]


def chosen_for(path: str) -> tuple[str, ...] | None:
    """Return what to give pytest, in tests/, for a mutation of the file at `path`; None if the file is left out.

    Empty if the table does not say.
    """
    chosen = choice().get(row_for(path), "")
    if chosen == "-":
        return None
    path = path.removeprefix(f"{PACKAGE}/")
    return tuple(dict.fromkeys(test for word in chosen.split() for test in _found(word, Path(path))))


def choice() -> dict[str, str]:
    """Read the table: what each pattern of files runs."""
    rows = [line.partition(":") for line in CHOSEN.read_text().splitlines() if line and not line.startswith("#")]
    return {pattern: chosen.strip() for pattern, _, chosen in rows}


def row_for(path: str) -> str | None:
    """Return the first pattern of the table that the file fits."""
    path = path.removeprefix(f"{PACKAGE}/")
    return next((pattern for pattern in choice() if fnmatch.fnmatchcase(path, pattern)), None)


def _found(word: str, path: Path) -> list[str]:
    pattern = word.format(folder=path.parent.as_posix(), name=path.stem.lstrip("_"))
    tests = ROOT / "tests"
    return [file.relative_to(tests).as_posix() for file in sorted(tests.glob(pattern))]


@dataclass(frozen=True)
class Equivalent:
    """A change of a file that changes nothing: the lines that it removes and adds, in one function."""

    path: str
    function: str
    change: tuple[str, ...]
    reason: str

    def matches(self, mutation: Mutation, source: str) -> bool:
        return (self.path, self.function) == (mutation.path, mutation.function) and (
            self.change == mutation.change(source)
        )


def equivalents() -> list[Equivalent]:
    """Read the list. A paragraph is one: its place, the lines removed and added, and the reason."""
    found = []
    for paragraph in EQUIVALENTS.read_text().split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line and not line.startswith("#")]
        if lines:
            path, _, function = lines[0].partition(" ")
            change = tuple(line for line in lines[1:] if line[:2] in ("- ", "+ "))
            reason = " ".join(line.strip() for line in lines[1:] if line[:2] not in ("- ", "+ "))
            found.append(Equivalent(f"{PACKAGE}/{path}", function, change, reason))
    return found


def outdated(listed: list[Equivalent]) -> list[str]:
    """Return a sentence for each of the equivalents that no longer exists or has no reason."""
    wrong = []
    for one in listed:
        file = ROOT / one.path
        source = file.read_text() if file.is_file() else ""
        if not any(one.matches(mutation, source) for mutation in mutations(one.path, source)):
            wrong.append(f"{one.path} {one.function} has no such mutation: {' '.join(one.change)}")
        if not one.reason:
            wrong.append(f"{one.path} {one.function} is listed without a reason: {' '.join(one.change)}")
    return wrong
