"""Describe the effect of each way into a process here, from facts of this environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder

from ..._engine.entry_points import GROUP
from ..._reporting.report import Report
from ..._versions import find_module
from ...patch import Status
from ...reach._run.site.sitecustomize import HERE, TARGETS


def routes(
    report: Report,
    ray: str | None,
    third_parties: Sequence[str],
    entry_points_off: bool,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return one or two sentences for each way into a process.

    Args:
        report: of this process.
        ray: Ray's version, None where it is not installed.
        third_parties: the distributions that have an entry point.
        entry_points_off: whether the settings switch entry points off.
        environment: the environment variables.
    """
    applied = sum(patch.status is Status.APPLIED for patch in report.patches)
    what = f"{applied} patch{'es' * (applied > 1)}" if applied else "the patches that are needed"
    modules = {site.module for patch in report.patches for site in patch.sites}
    here = sum(find_module(name) is not None for name in modules)
    return {
        "import megapatch": f"puts {what} into the process that imports it, before or after Megatron's import; "
        "its Ray workers, ranks and children have to import it themselves",
        "megapatch run": f"watches for {len(modules)} modules, {here} of which are installed, in every Python "
        f"process below it{_run(environment)}",
        "torchrun, spawn": "`megapatch run -- torchrun ...` reaches their processes; else they import megapatch "
        "themselves",
        "Ray": _ray(environment, ray),
        "entry points": _entry_points(third_parties, entry_points_off),
    }


def _run(environment: Mapping[str, str]) -> str:
    text = ""
    others = [folder for folder in sys.path if os.path.realpath(folder) != os.path.realpath(HERE)]
    if TARGETS in environment:
        text = "; this process is below one"
        if len(others) == len(sys.path):
            text = f"; {TARGETS} is set, yet {HERE} is not on the path: someone has replaced PYTHONPATH"
    shadowed = PathFinder.find_spec("sitecustomize", others)
    if shadowed is not None and shadowed.origin:
        text += f"; another sitecustomize runs as well: {shadowed.origin}"
    return text


def _ray(environment: Mapping[str, str], version: str | None) -> str:
    if version is None:
        return "not installed"
    text = (
        f"{version}: in the driver ray.init(runtime_env=megapatch.reach.ray.runtime_env(...)), or "
        "megapatch.reach.ray.compose_into_init() where a framework calls ray.init; megapatch has to be installed "
        "where workers run"
    )
    if hook := environment.get("RAY_RUNTIME_ENV_HOOK"):
        text += f"; RAY_RUNTIME_ENV_HOOK={hook} is set: it gets that environment last, and may change it"
    if job := environment.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        try:
            hook = (json.loads(job).get("runtime_env") or {}).get("worker_process_setup_hook")
        except (ValueError, AttributeError):
            hook = None
        text += "; this is the driver of a Ray job"
        if hook:
            text += f" with a hook of its own ({hook}): take compose_into_init(), Ray refuses two"
    return text


def _entry_points(third_parties: Sequence[str], off: bool) -> str:
    if off:
        return "switched off (MEGAPATCH_NO_ENTRY_POINTS)"
    if not third_parties:
        return f"on; no installed distribution has one in the group {GROUP}"
    return f"on: {', '.join(third_parties)}"
