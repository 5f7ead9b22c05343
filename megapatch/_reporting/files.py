"""The files that the ranks of a run leave in a folder, one each: written whole, and read as far as they can be."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .._printable import cut
from .numbers import numbered
from .terminal import as_json

_MOST_RANKS = 2**20
_LARGEST = 2**26  # bytes; ours have some 100 KB
_LATEST = 2**33  # seconds since 1970, in the year 2242
_WORLD = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
"""Variables that are the same on all ranks of an attempt, and often others on those of another one."""
_IN_WORDS = {dict: "an object", list: "a list", str: "text", int: "a number"}
_own: dict[tuple[int, Path], Path] = {}
"""By process and the first name that its file could have, the file that it writes."""


_Parsed = TypeVar("_Parsed")


def process() -> dict[str, Any]:
    """Return the keys of a file that show which process has written it."""
    world = " ".join(filter(None, map(os.environ.get, _WORLD)))
    return {"host": platform.node(), "pid": os.getpid(), "world": world}


def path_of(folder: Path, kind: str, rank: int) -> Path:
    """Return the path of a rank's file.

    Args:
        kind: the beginning of the file's name.
    """
    return folder / f"{kind}-{rank:05}.json"


def write_own(folder: Path, kind: str, rank: int, data: dict[str, Any]) -> None:
    """Write this process's file, over its own from before, and not over another process's.

    Another attempt, or another model's job, may use the same folder.

    Raises:
        OSError: where that is not possible.
    """
    first = path_of(folder, kind, rank)
    if (place := (os.getpid(), first)) not in _own:
        _own[place] = _new_path(first)
    write(_own[place], data)


def _new_path(first: Path) -> Path:
    """Return a path of a rank's file that nothing has, and take it: from the second on it has a number."""
    first.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        path = first.with_stem(f"{first.stem}-{number}") if number else first
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path
    raise AssertionError  # numbers do not end


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a file, in a folder that is made if it is not there: a reader finds a whole file, or none.

    Raises:
        OSError: where that is not possible.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.{os.urandom(4).hex()}.part")
    try:
        with part.open("x", encoding="utf-8") as file:  # never through a link that somebody has put there
            file.write(as_json(data))
        put(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def why_not_writable(folder: Path) -> str | None:
    """Return why no file can be made in a folder, or in the one where it would be made; None if one can."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return error.strerror or str(error)


def put(part: Path, path: Path) -> None:
    """Give a file that is written whole its name, in place of a regular file or of none.

    Raises:
        FileExistsError: where something else has the name. Root could replace a device, such as /dev/null.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "not a regular file, so it is not replaced", str(path))
    part.replace(path)


def read(
    folder: Path, kind: str, unreadable: list[str], parse: Callable[[dict[str, Any]], _Parsed]
) -> Iterator[_Parsed]:
    """Yield what `parse` makes of each rank's file; add a sentence for each that cannot be one to `unreadable`."""
    for path in sorted(folder.glob(f"{kind}-*.json")):
        try:
            if not path.is_file():  # a pipe would be waited for
                raise ValueError("it is not a regular file")
            if path.stat().st_size > _LARGEST:
                raise ValueError(f"it has more than {_LARGEST} bytes")
            data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
            if not isinstance(data, dict):
                raise ValueError(f"expected an object, found {type(data).__name__}")
            rank, size = data.get("rank"), data.get("size")
            if not (type(rank) is type(size) is int and 0 <= rank < size <= _MOST_RANKS):
                raise ValueError(f"expected a rank of at most {_MOST_RANKS}, found rank {rank} of {size}")
            if not 0 <= (began := data.get("began", 0)) < _LATEST:
                raise ValueError(f"expected a time in seconds since 1970, found {began}")
            parsed = parse(data)
        except Exception as error:  # a foreign file may hold anything
            unreadable.append(f"{path} cannot be read: {type(error).__name__}: {cut(str(error), 200)}")
        else:
            yield parsed


def expect(data: Any, shape: Any) -> None:
    """Raise where a value that was read from JSON lacks a key, or has another type.

    Args:
        shape: a type; a list with the shape of all items; a dict with that of each key, or, by `str`, of any key.
    """
    kind: Any = shape if isinstance(shape, type) else type(shape)
    if not isinstance(data, kind):
        raise TypeError(f"expected {_IN_WORDS[kind]}, found {type(data).__name__}")
    if kind is list:
        for item in data:
            expect(item, shape[0])
    elif kind is dict:
        for key in data if str in shape else shape:
            expect(data[key], shape.get(key, shape.get(str)))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


_Read = TypeVar("_Read", bound=Mapping[str, Any])


def attempts(reports: Sequence[_Read]) -> list[list[_Read]]:
    """Return the contents of files that belong together, oldest first: of one world, and one of each rank.

    A file that was begun after the last sign of the others is another attempt's.
    """
    found: list[dict[int, _Read]] = []
    latest: dict[str, dict[int, _Read]] = {}
    last_sign: dict[str, float] = {}
    for report in sorted(reports, key=lambda report: float(report.get("began", 0))):
        world, began = str(report.get("world", "")), float(report.get("began", 0))
        if world not in latest or report["rank"] in latest[world] or began > last_sign[world]:
            latest[world], last_sign[world] = {}, began
            found.append(latest[world])
        latest[world][report["rank"]] = report
        last_sign[world] = max(last_sign[world], began + float(report.get("seconds", math.inf)))
    return [list(by_rank.values()) for by_rank in found] or [[]]


def read_attempts(
    folder: Path, kind: str, parse: Callable[[dict[str, Any]], _Read]
) -> tuple[list[list[_Read]], list[str]]:
    """Return what `parse` makes of the files of each attempt, and sentences on what is missing or unreadable."""
    unreadable: list[str] = []
    found = attempts(list(read(folder, kind, unreadable, parse)))
    for number, attempt in enumerate(found, 1):
        missing = set(range(max((report["size"] for report in attempt), default=0)))
        missing -= {report["rank"] for report in attempt}
        if missing:
            of = f"attempt {number} of {len(found)}: " if found[1:] else ""
            unreadable.append(f"{of}{numbered('rank', sorted(missing))} left no file in {folder}")
    return found, unreadable
