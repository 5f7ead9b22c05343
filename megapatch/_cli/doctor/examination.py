"""Doctor's examination: every patch, where packages come from, the settings, the ways in, and the problems."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any, NamedTuple

from ... import _api
from ..._engine import entry_points, third_party
from ..._engine.complaints import unknown_variables
from ..._engine.engine import this_process
from ..._engine.settings import DISABLE, ONLY, REPORT, VARIABLES, Settings
from ..._python.finding import find_module
from ..._reporting import files, terminal
from ..._reporting.report import Report, SiteReport
from ..._reporting.terminal import COULD_NOT_LOOK, NOT_WELL, WELL
from ...patch import Status
from ...patches._catalogue import CATALOGUE
from ...reach._run.site.sitecustomize import HERE, TARGETS
from . import origins


class Examination(NamedTuple):
    """Doctor's findings.

    Attributes:
        report: of all patches.
        packages: where each package that matters comes from.
        settings: each MEGAPATCH_* variable that is set, its value, and its effect.
        reach: each way into a process, and its effect here.
        problems: in words, sites that need attention first.
        exit_code: WELL, NOT_WELL or COULD_NOT_LOOK.
    """

    report: Report
    packages: Sequence[origins.Package]
    settings: Sequence[tuple[str, str, str]]
    reach: Mapping[str, str]
    problems: Sequence[str]
    exit_code: int

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary: the report's, with the rest added."""
        return {
            **self.report.to_dict(),
            "packages": [package._asdict() for package in self.packages],
            "settings": [
                dict(zip(("name", "value", "effect"), setting, strict=True)) for setting in self.settings
            ],
            "reach": [{"route": route, "effect": effect} for route, effect in self.reach.items()],
            "problems": list(self.problems),
            "exit_code": self.exit_code,
        }

    def text(self, columns: int) -> str:
        """Return the text for people: packages, patches, settings, ways in. Problems are printed separately."""
        rows = [(package.name, f"{package.version or '?'}, {package}") for package in self.packages]
        settings = [
            (name if len(value) > columns else f"{name}={value}", effect) for name, value, effect in self.settings
        ]
        parts = [
            ["packages", *_rows(rows, columns)],
            ["patches", *self.report.table(columns)],
            ["settings", *(_rows(settings, columns) or ["  none: no MEGAPATCH_* variable is set"])],
            ["ways in", *_rows(list(self.reach.items()), columns)],
            [f"digest {self.report.digest}"],
        ]
        return "\n\n".join("\n".join(part) for part in parts)


def examine(importing: bool) -> Examination:
    """Look at everything, as `doctor` does."""
    from ...audit._settings import bad_values  # here: the other commands need nothing of the audit

    errors = _import_targets() if importing else {}
    this_process().load_all()
    report = _with_errors(_api.report(), errors)
    problems = list(_not_imported(errors))
    complaints = this_process().roster.complaints()
    sites = [(patch.patch.name, site) for patch in report.patches for site in patch.sites]
    bad = [
        f"not in place: {name} at {site.module} is {site.status.value}: {site.reason}"
        for name, site in sites
        if site.status.needs_attention
    ]
    if not _is_there(_to_patch()):
        problems.append(
            "nothing to patch is installed here: found no megatron-core; install it next to megapatch "
            "(pip install megatron-core), or run doctor in the environment that trains"
        )
    if importing:
        problems += [
            f"not diagnosed: {name} at {site.module} is {site.status.value}: {site.reason}"
            for name, site in sites
            if site.status is Status.PENDING and site.module not in errors
        ]
    problems += [*complaints, *unknown_variables(os.environ), *bad_values(os.environ), *_bad_report_folder()]
    third_parties = _third_parties()
    packages = origins.packages(third_parties)
    return Examination(
        report=report,
        packages=packages,
        settings=_settings(os.environ, report),
        reach=routes(
            report,
            ray=next(
                (package.version or "of unknown version" for package in packages if package.name == "ray"), None
            ),
            third_parties=[f"{dist.name} {dist.version}" for dist in third_parties],
            entry_points_off=this_process().settings.no_entry_points,
        ),
        problems=[*bad, *problems],
        exit_code=NOT_WELL if bad else COULD_NOT_LOOK if problems else WELL,
    )


def _bad_report_folder() -> Iterator[str]:
    folder = os.environ.get(REPORT)
    if folder and (reason := files.why_not_writable(Path(folder))):
        yield f"{REPORT}={folder}: expected a folder in which ranks can write files, found none: {reason}"


def _to_patch() -> list[str]:
    """Return the modules of Megatron and of frameworks that megapatch's own patches are for.

    Torch, which the audit watches as well, does not make it worth saying that all is well. Nor do the targets of
    other distributions' patches, and packages that come without a Megatron.
    """
    others = ("nvidia_resiliency_ext", "mbridge", "mcore_bridge")
    modules = {module for family in CATALOGUE.values() for names in family.values() for module in names}
    return sorted(module for module in modules if module.partition(".")[0] not in others)


def _is_there(modules: Iterable[str]) -> bool:
    """Return whether any of the modules could be imported; the status of a disabled patch does not say so."""
    return any(name in sys.modules or find_module(name) is not None for name in modules)


def _import_targets() -> dict[str, str]:
    """Import every installed target. Return, by module, why it cannot be imported."""
    asked: dict[str, str | None] = {}
    while todo := _pending() - asked.keys():  # third-party patches bring more
        for number, name in enumerate(sorted(todo), 1):
            terminal.progress(f"importing what is patched, {number} of {len(todo)}: {name}")
            asked[name] = _import_target(name)
    terminal.progress("")
    return {name: error for name, error in asked.items() if error is not None}


def _pending() -> set[str]:
    """Return the modules that are installed and not imported yet."""
    sites = (site for patch in _api.report().patches for site in patch.sites)
    return {site.module for site in sites if site.status is Status.PENDING}


def _import_target(name: str) -> str | None:
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
        return f"cannot be imported: {type(error).__name__}: {error}"
    finally:
        engine.settings = settings
    return None


def _not_imported(errors: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each error, with the modules that cannot be imported for it."""
    modules: dict[str, list[str]] = {}
    for name, error in errors.items():
        modules.setdefault(error, []).append(name)
    for error, (first, *more) in modules.items():
        others = f", with {terminal.counted(len(more), 'other module')}," if more else ""
        yield f"{first}{others} is installed but {error}"


def _with_errors(report: Report, errors: Mapping[str, str]) -> Report:
    """Return the report with the errors of sites whose module cannot be imported as their reasons."""

    def explained(site: SiteReport) -> SiteReport:
        pending = site.status is Status.PENDING
        return site._replace(reason=errors.get(site.module, site.reason)) if pending else site

    return report._replace(
        patches=tuple(patch._replace(sites=tuple(map(explained, patch.sites))) for patch in report.patches)
    )


def _third_parties() -> list[Distribution]:
    entries = third_party.entry_points() if entry_points.may_be_there(this_process().settings) else []
    return list({entry.dist.name: entry.dist for entry in entries if entry.dist is not None}.values())


def _settings(environment: Mapping[str, str], report: Report) -> list[tuple[str, str, str]]:
    """Return each known variable that is set: name, value, and effect here."""
    settings = Settings.from_environment(environment)
    patches = [patch.patch for patch in report.patches]
    off = [patch for patch in patches if settings.switched_off(patch.name, patch.changes_numbers)]
    on = [patch for patch in patches if not settings.why_disabled(patch.name, patch.changes_numbers)]
    effects = VARIABLES | {
        DISABLE: f"keeps off {report.names(off) or 'nothing'}",
        ONLY: f"keeps off everything but {report.names(on) or 'nothing'}",
        TARGETS: "set by `megapatch run`, which this process is below",
    }
    return [
        (name, environment[name], f"{'off: 1 ' * settings.is_off(name)}{effect}")
        for name, effect in effects.items()
        if name in environment
    ]


def _rows(rows: Sequence[tuple[str, str]], columns: int) -> list[str]:
    return terminal.table(rows, columns, indent="  ", widest=24)


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
    what = terminal.counted(applied, "patch", "patches") if applied else "the patches that are needed"
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
    return text


def _entry_points(third_parties: Sequence[str], off: bool) -> str:
    if off:
        return "switched off (MEGAPATCH_NO_ENTRY_POINTS)"
    if not third_parties:
        return f"on; no installed distribution has one in the group {entry_points.GROUP}"
    return f"on: {', '.join(third_parties)}"
