"""Check that a patch leaves alike: a function's appearance, the process around a diagnosis, the originals."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import os
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from .._dotted import find
from .._engine.engine import Engine
from .._engine.settings import Settings
from .._engine.site_record import SiteRecord
from .._engine.target import AddedTarget, ReplacedTarget
from ..patch import Patch, Verdict
from ._import_orders import import_targets


def run(rank: int, world_size: int, patches: tuple[Patch, ...]) -> list[str]:
    """Check in one process everything that needs no scenario; return the problems."""
    engine = Engine(patches, Settings())
    import_targets(patches)
    before = {record: _contents(record) for record in engine.roster.sites}
    problems: list[str] = []
    verdicts = {record: _first_verdict(record, problems) for record in engine.roster.sites}

    engine.activate()
    installed = _installed(engine)
    _apply_often(engine)
    if _installed(engine) != installed:
        problems.append("applying again has installed targets again")
    for target in installed:
        problems += _differences(target)
    for record, verdict in verdicts.items():
        if (again := _diagnose(record)) != verdict:
            problems.append(
                f"{record.patch.name}: once patched, its verdict is {_words(again)}; it was {_words(verdict)}"
            )

    engine.restore()
    for record, contents in before.items():
        problems += [
            f"{record.patch.name}: restore() leaves {name} changed" for name in _changed(record, contents)
        ]
    return problems


def _installed(engine: Engine) -> list[ReplacedTarget]:
    return [target for record in engine.roster.sites for target in record.installed]


def _apply_often(engine: Engine, threads: int = 64, calls: int = 1000) -> None:
    def apply() -> None:
        for _ in range(calls // threads + 1):
            engine.apply()

    running = [threading.Thread(target=apply) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def _differences(target: ReplacedTarget) -> Iterator[str]:
    """Check that the replacement can be used wherever the original can."""
    if not target.is_function:
        return
    function = target.current
    if type(function) is not FunctionType:
        yield f"{target.target} is a {type(function).__name__}, not a plain function"
    if not isinstance(target, AddedTarget):
        if not _takes_the_same(target.original, function):
            yield f"{target.target} has another signature: {inspect.signature(function)}"
        if (function.__name__, function.__doc__) != (target.original.__name__, target.original.__doc__):
            yield f"{target.target} has lost its name or docstring (functools.wraps keeps them)"
    if copy.deepcopy(function) is not function:
        yield f"{target.target} is another object once copied"
    if "<locals>" not in getattr(target.original, "__qualname__", ""):  # it could be pickled by its name
        yield from _differences_once_pickled(target.target, function)


def _differences_once_pickled(name: str, function: Any) -> Iterator[str]:
    for pickler in ("pickle", "cloudpickle"):
        try:
            dumps = importlib.import_module(pickler).dumps
        except ImportError:
            continue
        try:
            if pickle.loads(dumps(function)) is not function:
                yield f"{name} is another object once pickled by {pickler}"
        except Exception as error:
            yield f"{name} cannot be pickled by {pickler}: {type(error).__name__}: {error}"


def _takes_the_same(original: Any, function: Any) -> bool:
    """Return whether the replacement takes the same parameters.

    It may also have parameters of a later release, with defaults. A decorator with *args and **kwargs, which hides
    the function's parameters, may be replaced by a function that shows them.
    """
    theirs, ours = (
        {
            name: (parameter.kind, parameter.default)
            for name, parameter in inspect.signature(which).parameters.items()
        }
        for which in (original, function)
    )
    if {"args", "kwargs"} <= theirs.keys():
        return True
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    more = [default for name, (kind, default) in ours.items() if name not in theirs and kind not in collecting]
    kept = [(name, taken) for name, taken in ours.items() if name in theirs]
    return kept == list(theirs.items()) and inspect.Parameter.empty not in more


def _contents(record: SiteRecord) -> dict[str, Any]:
    """Return the contents of the site's module and of the classes of its targets, by name."""
    module = sys.modules.get(record.site.module)
    if module is None:
        return {}
    found = {f"{module.__name__}:{name}": value for name, value in vars(module).items()}
    for path in {path.rpartition(".")[0] for path in record.site.paths} - {""}:
        owner = vars(find(module, path))
        found.update({f"{module.__name__}:{path}.{name}": value for name, value in owner.items()})
    return found


def _diagnose(record: SiteRecord) -> Any:
    module = sys.modules.get(record.site.module)
    return record.site.diagnose(module) if module else None


def _words(verdict: Any) -> str:
    return f"{verdict.kind.value} ({verdict.reason})" if isinstance(verdict, Verdict) else str(verdict)


def _changed(record: SiteRecord, before: dict[str, Any]) -> list[str]:
    """Return the names whose object was replaced, added or removed."""
    now = _contents(record)
    return [name for name in {**before, **now} if name not in now or before.get(name) is not now[name]]


def _first_verdict(record: SiteRecord, problems: list[str]) -> Any:
    """Diagnose for the first time, when imports and caches are not there yet, and note the changes."""
    contents, surroundings = _contents(record), _surroundings()
    verdict = _diagnose(record)
    after = _surroundings()
    changed = [name for name in surroundings if surroundings[name] != after[name]] + _changed(record, contents)
    problems += [f"{record.patch.name}: its diagnosis changes {name}" for name in changed]
    return verdict


def _surroundings() -> dict[str, Any]:
    found: dict[str, Any] = {
        "the modules that are loaded": _modules_of_others(),
        "the environment": dict(os.environ),
        "the working directory": (os.getcwd(), sorted(os.listdir())),
        "the import path": list(sys.path),
        "the warning filters": list(warnings.filters),
        "garbage collection": gc.isenabled(),
        "the threads": threading.active_count(),
        "Python's random numbers": random.getstate(),
    }
    if torch := sys.modules.get("torch"):
        found["torch's random numbers"] = torch.get_rng_state().tolist()
        found["torch's process group"] = torch.distributed.is_initialized()
        found["torch's defaults"] = (torch.get_default_dtype(), torch.is_grad_enabled())
    if numpy := sys.modules.get("numpy"):
        found["numpy's random numbers"] = str(numpy.random.get_state())
    return found


def _modules_of_others() -> set[str]:
    """Return the loaded modules except the standard library's, which a diagnosis may import."""
    usual = {*sys.stdlib_module_names, "megapatch"}
    return {
        name
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] not in usual
    }
