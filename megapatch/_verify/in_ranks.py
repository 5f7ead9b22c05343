"""The part of verify that runs in the ranks' processes: they are new, and end after one of these calls."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from ..patch import Status
from .check import CannotRunHere, DefectSeen, Layout
from .checks import CHECKS


def _most_telling(status: Status) -> tuple[bool, ...]:
    """Order a patch's sites: the first one counts, and a patch that is applied anywhere can be verified."""
    return not status.needs_attention, status is not Status.APPLIED


class PatchStatus(NamedTuple):
    """The status of a patch in the processes: its status and the reason, in words."""

    status: str
    reason: str


class Look(NamedTuple):
    """The findings of a rank before any check.

    Attributes:
        device: ``CPU``, or the GPU's name.
        statuses: of each patch that was asked for.
    """

    device: str
    statuses: dict[str, PatchStatus]


class ScenarioResult(NamedTuple):
    """The results of a rank in a run that met no defect.

    Attributes:
        differences: by layout; None where there are no numbers.
        findings: of the audit, in words.
        seconds: that the scenario took, without the start of the processes.
    """

    differences: dict[str, float | None]
    findings: tuple[str, ...]
    seconds: float


class ScenarioFailed(Exception):
    """A scenario failed on something other than its defect; the message says in which layout."""


def look(rank: int, world_size: int, names: tuple[str, ...]) -> Look:
    """Import the targets of these patches, and return the status of each.

    Raises:
        CannotRunHere: Megatron itself cannot be imported.
    """
    import torch

    try:
        import megatron.core  # noqa: F401
    except Exception as error:
        what = str(error).partition("\n")[0]
        raise CannotRunHere(f"megatron.core cannot be imported: {type(error).__name__}: {what}") from error

    statuses = _statuses(names) if names else {}
    on_gpu = torch.cuda.is_available()  # never with the CUDA stubs
    return Look(torch.cuda.get_device_name() if on_gpu else "CPU", statuses)


def _statuses(names: tuple[str, ...]) -> dict[str, PatchStatus]:
    from importlib import import_module

    from .._api import report
    from .._engine.engine import this_process
    from .._python.finding import find_module

    quiet()
    this_process().load_families()
    errors: dict[str, str] = {}
    for entry in report().patches:
        for site in entry.sites if entry.patch.name in names else ():
            if site.module not in errors and find_module(site.module) is not None:
                errors[site.module] = ""
                try:
                    import_module(site.module)
                except BaseException as error:  # some modules exit where there is no GPU
                    errors[site.module] = f"{site.module} cannot be imported: {type(error).__name__}: {error}"
    found = {}
    for entry in report().patches:
        if entry.patch.name in names:
            worst = min(entry.sites, key=lambda site: _most_telling(site.status))
            reason = worst.reason
            if worst.status is Status.PENDING:
                reason = errors.get(worst.module) or reason
            found[entry.patch.name] = PatchStatus(worst.status.value, reason)
    return found


def run_scenario(rank: int, world_size: int, name: str, layouts: tuple[Layout, ...]) -> ScenarioResult:
    """Run a check's scenario in these layouts.

    Raises:
        DefectSeen: the scenario met its defect.
        CannotRunHere: the scenario needs something that is missing.
        ScenarioFailed: the scenario failed in another way.
    """
    from .. import audit

    quiet()
    (check,) = [check for check in CHECKS if check.name == name]
    started = time.monotonic()
    differences: dict[str, float | None] = {}
    for layout in layouts:
        try:
            differences[layout.name] = check.scenario(layout)
        except DefectSeen as defect:
            raise DefectSeen(f"{layout.name}: {defect}") from defect
        except CannotRunHere:
            raise
        except Exception as error:
            raise ScenarioFailed(f"in the layout {layout.name}: {type(error).__name__}: {error}") from error
    findings = tuple(map(str, audit.findings()))
    return ScenarioResult(differences, findings, time.monotonic() - started)


def quiet() -> None:
    """Discard Megatron's output; a failure comes back as an exception."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def last_line(error: Any, kind: str) -> str | None:
    """Return the message of the first rank that raised an exception of this name, or None."""
    for text in error.failures.values():
        for line in reversed(text.strip().splitlines()):
            _, found, message = line.partition(f"{kind}: ")
            if found and not line.startswith(" "):
                return str(message)
    return None
