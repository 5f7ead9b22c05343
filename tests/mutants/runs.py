"""Run chosen tests in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

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
        self._seconds: dict[str, dict[str, float]] = {}  # by stage and file, of tests that are not skipped here
        self._startup = 0.0

    def source(self, path: str) -> str:
        return (self.folder / path).read_text()

    def check(self, tests: Iterable[str]) -> str | None:
        """Run `tests`, once, without a mutation. Return None if they pass, otherwise what pytest printed."""
        report = self._log.with_suffix(".xml")
        for stage in STAGES:
            code, seconds = self._pytest([*tests, f"--junitxml={report}"], stage, 1800.0)
            if code not in (0, NO_TESTS):
                return self._log.read_text()
            ran = self._seconds[stage] = {}
            for test in ElementTree.parse(report).iter("testcase"):
                if test.find("skipped") is None:
                    file = test.get("classname").removeprefix("tests.").replace(".", "/") + ".py"
                    ran[file] = ran.get(file, 0.0) + float(test.get("time"))
            self._startup = max(self._startup, seconds - sum(ran.values()))
        return None

    def limit(self, tests: Iterable[str], stage: str) -> float | None:
        """Return how many seconds `tests`, which were checked, may take; None if none runs in this stage."""
        found = [self._seconds[stage][file] for file in tests if file in self._seconds[stage]]
        return 30.0 + 4 * (self._startup + sum(found)) if found else None

    def run(self, mutation: Mutation, tests: tuple[str, ...]) -> Outcome:
        """Run `tests`, which were checked, with a mutation. Taking much longer than without it is noticed, too."""
        path = self.folder / mutation.path
        source, times = path.read_text(), path.stat()
        began = time.monotonic()
        path.write_text(mutation.apply(source))
        # Python takes a .pyc for the source's if its second and its size are the same.
        os.utime(path, (times.st_atime, times.st_mtime + 86400))
        try:
            for stage in STAGES:
                if limit := self.limit(tests, stage):
                    code, _ = self._pytest(tests, stage, limit)
                    if code != 0:
                        how = self._how(code, limit)
                        return Outcome(True, time.monotonic() - began, how)
        finally:
            path.write_text(source)
            os.utime(path, (times.st_atime, times.st_mtime))
        return Outcome(False, time.monotonic() - began, "no test failed")

    def _pytest(self, tests: Iterable[str], stage: str, limit: float) -> tuple[int | None, float]:
        """Return pytest's exit code, None if it was ended after `limit` seconds, and how long it ran."""
        options = ["-c", "../tox.ini", "-x", "-q", "-rf", "--tb=line", "--no-header", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, "-m", stage, *tests]
        environment = {**os.environ, "PYTHONPATH": os.fspath(self.folder)}
        if self._seconds:  # what is compiled of a mutation must not stay
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
