"""Import and diagnose each module in a child process of its own: a crash becomes a line in the report."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..._engine.engine import this_process
from ..._printable import cut
from ..._reporting.files import put
from ..._reporting.foreign import patched_by_others
from ..._reporting.report import PatchReport, Report, SiteReport
from ..._reporting.terminal import sigterm_raises
from ...patch import PatchInfo, Status

SECONDS = 300.0
"""How long an import may take: Megatron's, from a cold network disk, takes minutes."""

# sys.path is the parent's before anything is imported: `python -c` would look in the working directory.
_CHILD = (
    "import sys; sys.path[:] = sys.argv[3:]; from megapatch._cli.doctor.probe import child; child(*sys.argv[1:3])"
)


class _Answer(NamedTuple):
    patches: list[dict[str, Any]]
    problem: str | None
    others: Sequence[Sequence[str]] = ()


def probe(report: Report, seconds: float = SECONDS) -> tuple[Report, list[str], list[tuple[str, str]]]:
    """Return the report with each pending site as a child process found it, failed imports, and others' patches.

    Args:
        report: of this process.
        seconds: a child that takes longer is killed.
    """
    known = {patch.patch.name: patch for patch in report.patches}
    names = set(known)
    before: dict[str, str] = {}  # what has to be imported first: the module that brings a third party's patch
    asked: set[str] = set()
    problems, others = [], set(patched_by_others())
    while todo := pending(known.values()) - asked:
        asked |= todo
        answers = _ask_all({name: [*filter(None, [before.get(name)]), name] for name in sorted(todo)}, seconds)
        for module, answer in answers.items():
            if answer.problem:
                problems.append(f"{module} is installed but cannot be imported: {answer.problem}")
            _merge(known, module, answer)
            others |= {(who, target) for who, target in answer.others}
            if not answer.problem:  # third-party patches, which only the child has loaded
                known.update(
                    {
                        patch["name"]: _read(patch)
                        for patch in answer.patches
                        if patch["name"] not in {*names, *known}
                    }
                )
            for name in pending(known.values()) - asked - todo:
                before.setdefault(name, module)
    return report._replace(patches=tuple(known.values())), problems, sorted(others)


def child(result: str, modules: str) -> None:
    """Run in a child: import the modules, write the findings about the last one to the file `result`, and exit."""
    from ..._api import report

    sys.argv[1:] = []
    logging.getLogger("megapatch").setLevel(logging.CRITICAL)  # the report has it
    this_process().first_sign.hush()
    problem = None
    for name in modules.split(","):
        problem = import_target(name)
    with open(f"{result}.part", "w", encoding="utf-8") as file:
        answer = {"patches": report().to_dict()["patches"], "problem": problem, "others": patched_by_others()}
        json.dump(answer, file)
    put(Path(file.name), Path(result))
    os._exit(0)  # nothing that was imported may crash or wait now


def import_target(name: str) -> str | None:
    """Import a module. Return the failure, in words, or None.

    MEGAPATCH_STRICT is off meanwhile: a refused site would keep those in other modules of its package from being
    diagnosed.
    """
    engine = this_process()
    settings = engine.settings
    engine.settings = settings._replace(strict_value="0")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is the report's alone
            importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, too
        return f"{type(error).__name__}: {error}"
    finally:
        engine.settings = settings
    return None


def pending(patches: Iterable[PatchReport]) -> set[str]:
    """Return the modules that are installed and not imported yet."""
    return {site.module for patch in patches for site in patch.sites if site.status is Status.PENDING}


def _merge(known: dict[str, PatchReport], module: str, answer: _Answer) -> None:
    """Replace the records of the module's sites by those of a child process."""
    reported = {patch["name"]: patch for patch in answer.patches}
    for name, patch in list(known.items()):
        sites: list[SiteReport] = []
        for site in patch.sites:
            if site.module != module or site.status is not Status.PENDING:
                sites.append(site)
            elif answer.problem:
                sites.append(site._replace(reason=f"cannot be imported: {answer.problem}"))
            else:  # none is left of a placeholder whose patches are loaded now
                found = reported.get(name, {"sites": []})["sites"]
                sites += [SiteReport.from_dict(there) for there in found if there["module"] == module]
        if sites:
            known[name] = patch._replace(sites=tuple(sites))
        else:
            del known[name]


def _read(data: Mapping[str, Any]) -> PatchReport:
    sites = tuple(SiteReport.from_dict(site) for site in data["sites"])
    modules = tuple(dict.fromkeys(site.module for site in sites))
    doc = f"{data['name']} was loaded in another process."
    patch = PatchInfo(data["name"], doc, data["upstream"], modules, data["changes_numbers"])
    return PatchReport(patch, sites)


def _ask_all(modules: Mapping[str, list[str]], seconds: float) -> dict[str, _Answer]:
    """Ask four children at a time: each takes a few seconds and a few hundred MB."""
    with (
        sigterm_raises(SystemExit(128 + signal.SIGTERM)),
        tempfile.TemporaryDirectory(prefix="megapatch-probe-") as folder,
        ThreadPoolExecutor(4) as pool,
        _Children(folder, seconds) as children,  # innermost: its end is what the threads wait for
    ):
        answers = pool.map(children.ask, modules.values())
        return dict(zip(modules, answers, strict=True))


class _Children:
    """Child processes that import one module each. However the `with` ends, none is left."""

    def __init__(self, folder: str, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._starting = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *error: object) -> None:
        with self._starting:
            self._ended = True
            for process in self._running:
                process.kill()

    def ask(self, modules: list[str]) -> _Answer:
        """Import the modules in a new process, and return its findings."""
        result = os.path.join(self._folder, modules[-1])
        command = [sys.executable, "-c", _CHILD, result, ",".join(modules), *sys.path]
        with open(f"{result}.log", "w+", encoding="utf-8", errors="replace") as log:
            with self._starting:
                if self._ended:
                    return _Answer([], "not asked")
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                self._running.add(process)
            try:
                code = process.wait(self._seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return _Answer([], f"not done after {self._seconds:g} s")
            finally:
                self._running.discard(process)
            try:
                with open(result, encoding="utf-8") as file:
                    return _Answer(**json.load(file))
            except FileNotFoundError:
                log.seek(0)
                last = (log.read().strip().splitlines() or ["it said nothing"])[-1]
                how = f"died of {_name(-code)}" if code < 0 else f"ended with exit code {code}"
                return _Answer([], f"the process {how} ({cut(last, 200)})")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
