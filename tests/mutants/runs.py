"""Run chosen tests in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .find import Mutation

ROOT = Path(__file__).parent.parent.parent
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
NO_TESTS = 5  # pytest's exit code
# The second is for what survives the first.
STAGES = ("not thorough", "thorough")


@dataclass(frozen=True)
class Outcome:
    noticed: bool
    seconds: float
    how: str  # in words: the first failed test, or what else happened


class Copy:
    """A copy of the tree in `folder`, in which one file at a time is mutated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tree"
        shutil.copytree(ROOT, self.folder, ignore=NOT_COPIED)
        self._log = folder / "pytest.log"
        self._limits: dict[tuple[str, ...], list[float]] = {}

    def source(self, path: str) -> str:
        return (self.folder / path).read_text()

    def check(self, tests: tuple[str, ...]) -> str | None:
        """Run `tests` without a mutation, once. Return None if they pass, otherwise what pytest printed."""
        if tests not in self._limits:
            limits = []
            for stage in STAGES:
                code, seconds = self._pytest(tests, stage, 1800.0)
                if code not in (0, NO_TESTS):
                    return self._log.read_text()
                some_passed = code == 0 and " passed" in self._log.read_text()
                limits.append(30.0 + 4 * seconds if some_passed else 0.0)
            if not any(limits):
                return f"none of them runs here\n{self._log.read_text()}"
            self._limits[tests] = limits
        return None

    def run(self, mutation: Mutation, tests: tuple[str, ...]) -> Outcome:
        """Run `tests`, which were checked, with a mutation. Taking much longer than without it is noticed, too."""
        path = self.folder / mutation.path
        source, times = path.read_text(), path.stat()
        began = time.monotonic()
        path.write_text(mutation.apply(source))
        # Python takes a .pyc for the source's if its second and its size are the same.
        os.utime(path, (times.st_atime, times.st_mtime + 86400))
        try:
            for stage, limit in zip(STAGES, self._limits[tests], strict=True):
                if limit:
                    code, _ = self._pytest(tests, stage, limit)
                    if code != 0:
                        how = self._how(code, limit)
                        return Outcome(True, time.monotonic() - began, how)
        finally:
            path.write_text(source)
            os.utime(path, (times.st_atime, times.st_mtime))
        return Outcome(False, time.monotonic() - began, "no test failed")

    def _pytest(self, tests: tuple[str, ...], stage: str, limit: float) -> tuple[int | None, float]:
        """Return pytest's exit code, None if it was ended after `limit` seconds, and how long it ran."""
        options = ["-c", "../tox.ini", "-x", "-q", "-rf", "--tb=line", "--no-header", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, "-m", stage, *tests]
        environment = {**os.environ, "PYTHONPATH": os.fspath(self.folder)}
        if self._limits:  # what is compiled of a mutation must not stay
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        began = time.monotonic()
        with (
            open(self._log, "w") as log,
            subprocess.Popen(
                command,
                cwd=self.folder / "tests",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ) as process,
        ):
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):  # what a test started may have outlived it
                    os.killpg(process.pid, signal.SIGKILL)
        return code, time.monotonic() - began

    def _how(self, code: int | None, limit: float) -> str:
        if code is None:
            return f"ended after {limit:.0f} s"
        failed = [line for line in self._log.read_text().splitlines() if re.match(r"(FAILED|ERROR) \S", line)]
        return failed[0][:160] if failed else f"pytest exited with {code}"
