"""Which environment variables run what; what is skipped; and modules to patch, made for one test of the engine."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from rigs.chosen import choose, keywords_of
from rigs.where import TESTS, missing, reason_to_skip, runs_in_ci, uses_torch, with_other_releases

from megapatch._engine.engine import this_process
from megapatch._versions import here
from megapatch.patches._catalogue import CATALOGUE

PATCHES = TESTS.parent / "megapatch/patches"
_numbers = itertools.count()


class Variable(NamedTuple):
    """An environment variable that names a folder."""

    folder: str  # what it has to be
    has: tuple[str, ...]  # patterns of paths, of which the folder has at least one
    runs: str  # what is run when it is set


VARIABLES = {
    "SLIME_CHECKOUT": Variable(
        "a checkout of slime or miles",
        ("slime/backends/megatron_utils", "miles/backends/megatron_utils"),
        "slime's (or miles') patches on its own code instead of our imitation, and its way into Ray",
    ),
    "MEGATRON_CHECKOUT": Variable(
        "a checkout of Megatron-LM",
        ("megatron/core",),
        "with tox -e slime and tox -e jobs: that Megatron instead of a wheel",
    ),
    "NEMO_RL_CHECKOUT": Variable(
        "a checkout of NeMo-RL",
        ("nemo_rl/models/policy",),
        "NeMo-RL's patches on its own code instead of our imitation, and its way into Ray",
    ),
    "AUTOMODEL_CHECKOUT": Variable(
        "a checkout of NeMo Automodel",
        ("nemo_automodel",),
        "with NEMO_RL_CHECKOUT: the second DTensor worker, with this Automodel",
    ),
    "MEGATRON_BRIDGE_CHECKOUT": Variable(
        "a checkout of Megatron-Bridge",
        ("src/megatron/bridge",),
        "nemo_rl.hooks-without-overlap on Bridge's own function, besides our imitation",
    ),
    "SKYRL_CHECKOUT": Variable(
        "a checkout of SkyRL",
        tuple(
            f"{place}{name}"
            for place in ("", "skyrl-train/", "skyrl/")
            for name in ("skyrl_train", "skyrl/backends")
        ),
        "SkyRL's patches on it",
    ),
    "SKYRL_RELEASES": Variable(
        "a folder of folders, into each of which a wheel of SkyRL was installed, as by tox -e frameworks",
        ("*/skyrl_train", "*/skyrl/backends"),
        "SkyRL's patches on each",
    ),
    "AREAL_CHECKOUT": Variable("a checkout of AReaL", ("areal/engine",), "AReaL's patches on it"),
    "AREAL_RELEASES": Variable(
        "a folder of folders, into each of which a wheel of AReaL was installed, as by tox -e frameworks",
        ("*/areal/engine",),
        "AReaL's patches on each",
    ),
    "ROLL_CHECKOUT": Variable("a checkout of ROLL", ("roll/distributed",), "ROLL's patches on it"),
    "SWIFT_CHECKOUT": Variable("a checkout of ms-swift", ("swift/megatron",), "ms-swift's patches on it"),
    "SWIFT_RELEASES": Variable(
        "a folder of folders, into each of which a wheel of ms-swift was installed, as by tox -e frameworks",
        ("*/swift/megatron",),
        "ms-swift's patches on each",
    ),
    "VERL_CHECKOUT": Variable("a checkout of verl", ("verl/workers",), "verl's patches on it"),
    "VERL_RELEASES": Variable(
        "a folder of folders, into each of which a wheel of verl was installed, as by tox -e frameworks",
        ("*/verl/workers",),
        "verl's patches on each",
    ),
}


ABSENT = missing()


def pytest_addoption(parser):
    parser.addoption(
        "--torch",
        choices=("with", "without"),
        help="collect only the modules whose tests use torch, or only the others, which are faster without: torch "
        "and Megatron are thousands of modules, in all of which the engine looks for holders",
    )
    parser.addoption(
        "--ci",
        action="store_true",
        help="without those marked nightly; each module with its share of Megatrons: tests/rigs/where.py",
    )


def pytest_ignore_collect(collection_path, config):
    if collection_path.suffix == ".py" and not is_to_run(collection_path, config):
        return True
    wanted = config.getoption("torch")
    if wanted == "without" and collection_path.is_dir():
        return uses_torch(collection_path / "conftest.py") or None
    if wanted and collection_path.suffix == ".py":
        return uses_torch(collection_path) != (wanted == "with") or None
    return None


def pytest_configure(config):
    choose(config.getoption("keyword"))
    this_process().first_sign.hush()
    files = {f"{path.parent.name}.{path.stem.replace('_', '-')}" for path in PATCHES.glob("*/[!_]*.py")}
    if changed := files ^ {name for named in CATALOGUE.values() for name in named}:
        raise pytest.UsageError(
            f"run `cd tests && python -m pages`: patches have come or gone: {', '.join(changed)}"
        )
    if ABSENT and os.environ.get("MEGATRON_REQUIRED"):
        raise pytest.UsageError(f"MEGATRON_REQUIRED is set, and its tests {'; '.join(ABSENT.values())}")
    for name, variable in VARIABLES.items():
        if (value := os.environ.get(name)) and (problem := wrong_with(Path(value), variable)):
            raise pytest.UsageError(f"{name}={value}: expected {variable.folder}; {problem}")
    megatron = os.environ.get("MEGATRON_CHECKOUT")
    if megatron and not any(os.path.realpath(place) == os.path.realpath(megatron) for place in sys.path):
        raise pytest.UsageError(
            f"MEGATRON_CHECKOUT={megatron}: expected it on PYTHONPATH, where tox puts it; not found there"
        )


class Skipped(pytest.File):
    """A module, or a folder with its conftest.py, that is not imported: what it needs is not installed."""

    reason = ""

    def collect(self):
        pytest.skip(self.reason, allow_module_level=True)


def skipped(file, path, parent):
    if not ABSENT or not file.exists() or (reason := reason_to_skip(file, ABSENT)) is None:
        return None
    node = Skipped.from_parent(parent, path=path)
    node.reason = reason
    return node


def pytest_pycollect_makemodule(module_path, parent):
    return skipped(module_path, module_path, parent)


def pytest_collect_directory(path, parent):
    return skipped(path / "conftest.py", path, parent)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items, config):
    for item in items:
        item.extra_keyword_matches.update(keywords_of(item))
    if config.getoption("ci"):
        left_out = with_other_releases(items)
        left_out |= {item for item in items if item.get_closest_marker("nightly")}
        left_out |= {item for item in items if not is_to_run(item.path, config, is_quick(item))}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def is_quick(item):
    return item.get_closest_marker("quick") is not None


def is_to_run(file, config, quick=True):
    # A framework's own releases are tested with one Megatron, which need not be the newest.
    of_framework = any(os.environ.get(name) for name in VARIABLES if name.endswith("_RELEASES"))
    if not config.getoption("ci") or of_framework:
        return True
    return runs_in_ci(file.relative_to(TESTS).as_posix(), installed_megatron(), quick=quick)


@cache  # thousands of tests ask, and each answer reads the metadata of three distributions
def installed_megatron():
    return here().get("megatron-core", "")


def wrong_with(folder: Path, variable: Variable) -> str | None:
    if not folder.is_dir():
        return "found no folder there"
    if any(next(folder.glob(pattern), None) for pattern in variable.has):
        return None
    names = sorted(path.name for path in folder.iterdir())
    found = ", ".join(names[:8] + ["..."] * (len(names) > 8)) or "nothing"
    return f"found none of {', '.join(variable.has)} in it, but {found}"


def pytest_report_header():
    known = "with " + ", ".join(f"{name} {version}" for name, version in here().items())
    chosen = [f"{name}={os.environ[name]}: {VARIABLES[name].runs}" for name in VARIABLES if os.environ.get(name)]
    return [known, *chosen]


class Modules:
    """Writes importable modules whose names are used once: import hooks cannot be taken back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []

    def write(self, source: str, stem: str = "target") -> str:
        name = f"{stem}_{next(_numbers)}"
        (self.folder / f"{name}.py").write_text(source)
        self.names.append(name)
        importlib.invalidate_caches()
        return name


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a rewritten module must be read again
    made = Modules(tmp_path)
    yield made
    for name in made.names:
        sys.modules.pop(name, None)


@pytest.fixture
def fake_megatron(tmp_path):
    """Writes a stand-in for Megatron's DDP module, where only the engine or the command line is under test."""
    folder = tmp_path / "megatron" / "core" / "distributed"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()

    def write(source):
        (folder / "distributed_data_parallel.py").write_text(source)
        return tmp_path

    return write


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine function, on virtual time."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    from rigs.streaming.world import run

    run(test(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True
