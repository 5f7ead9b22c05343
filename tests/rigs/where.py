"""Where each test runs: what it needs, and its share of CI.

A test that needs torch or Megatron is skipped where it is not installed. A module is skipped as a whole if
importing it would import what is not installed, or if it, or a rig that it uses, imports Megatron anywhere: most
jobs import Megatron in their ranks. A module with tests of both kinds marks those that need Megatron with
`needs_megatron`; then only its own imports count. Only absence skips: what is installed and cannot be imported
fails. With MEGATRON_REQUIRED set, absence is an error (tests/conftest.py).

Each night every test runs in every environment that has what it needs. `pytest --ci` leaves out tests marked
`nightly`; SHARES says with which Megatrons it takes the others. Of the releases of a framework it takes one,
but for verdicts, and of the two shapes of NeMo-RL's code one.
"""

from __future__ import annotations

import ast
import collections
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from verdicts import table
from verdicts.releases import project_of

from megapatch._python.finding import find_module

Choice = TypeVar("Choice")
TESTS = Path(__file__).parent.parent
TORCH, MEGATRON = "torch", "megatron.core"
HOW_TO_GET = {
    TORCH: "needs torch, which is not installed here: pip install torch",
    MEGATRON: "needs megatron-core, which is not installed here: pip install --no-deps megatron-core, with torch, "
    "numpy, einops, psutil and pyyaml; or put a checkout of Megatron-LM on PYTHONPATH",
}
OF_TESTING = {"MegatronLoop", "destroy_parallel", "init_parallel", "tiny_gpt"}  # import Megatron when called

NEWEST = "0.19"  # and any other that is not one of these
OLDER = ("0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18")
README, OTHER_PYTHONS = (3, 11), ((3, 10), (3, 13))  # 3.12 has the newest Megatrons
EACH, ON_THE_READMES = (*OLDER, NEWEST), ("0.16",)
# The Megatrons of a module, by the first line that begins its path. A module without a line runs with the newest
# and one older one, by turns. One that needs none runs with the README's Python and one of the other two.
# Whatever the table says, quick tests of TrainStep run with each, where a wrong divisor fails, and those of
# Megatron's patches, the defect and the repair, with one older one, which needs the patch if the newest does not.
SHARES = {
    "patches/megatron/test_diagnos": EACH,
    "patches/megatron/test_edits.py": EACH,
    "test_package.py": EACH,
    "test_verdicts.py": EACH,
    "patches/megatron/": (NEWEST,),
    # They depend little on Megatron's version, or, of frameworks, not at all.
    "audit/": (NEWEST,),
    "jobs/": (NEWEST,),
    "no_harm/": (NEWEST,),  # and older ones lack half of what these programs do
    "patches/nemo_rl/": (NEWEST,),
    "patches/roll/": (NEWEST,),
    "patches/slime/": (NEWEST,),
    "test_demo.py": (NEWEST,),
    "verify/": (NEWEST,),
    # Nor do these; each of their processes imports torch for the README's Python in half the time.
    "doctor/test_all": ON_THE_READMES,
    "reach/test_run": ON_THE_READMES,
    "test_agree": ON_THE_READMES,
    "test_first": ON_THE_READMES,
    "test_read_only": ON_THE_READMES,
    "testing/": ON_THE_READMES,
}
QUICK_WITH_EACH, QUICK_BY_TURNS = "train_step/test_parity.py", "patches/megatron/"


def missing() -> dict[str, str]:
    """Return what is not installed here, with the reason to skip."""
    return {name: reason for name, reason in HOW_TO_GET.items() if find_module(name) is None}


def _mark(*names: str) -> pytest.MarkDecorator:
    absent = missing()
    return pytest.mark.skipif(
        any(name in absent for name in names), reason=next(iter(absent.values()), "installed")
    )


needs_torch = _mark(TORCH)
needs_megatron = _mark(TORCH, MEGATRON)


def reason_to_skip(file: Path, absent: dict[str, str]) -> str | None:
    """Return why this module of tests, or conftest.py, is not imported without what is absent, or None."""
    needed = _needs(file, at_import=True)
    if file.name != "conftest.py" and "needs_megatron" not in _marks(file):
        needed |= _needs(file, at_import=False) & {MEGATRON}
    return next((reason for name, reason in absent.items() if name in needed), None)


@cache
def uses_torch(file: Path) -> bool:
    """Return whether a module of tests, a rig that it uses or a conftest.py above it imports torch at any time."""
    above = [folder / "conftest.py" for folder in file.parents if folder.is_relative_to(TESTS)]
    return any(_needs(path, at_import=False) for path in [file, *above] if path.exists())


def runs_in_ci(
    module: str, megatron: str, python: tuple[int, ...] = sys.version_info[:2], *, quick: bool = True
) -> bool:
    """Return whether CI runs a module, named from tests/ on, with this Megatron or, if that is "", without one.

    `quick=False` asks for its tests that are not marked so; otherwise one that runs is enough.
    """
    share = next((share for beginning, share in SHARES.items() if module.startswith(beginning)), None)
    of_the_engine = share != EACH and runs_without_megatron(TESTS / module)
    if of_the_engine or not megatron:
        return not megatron and (share == EACH or python in (README, _turn(module, OTHER_PYTHONS)))
    minor = ".".join(megatron.split(".")[:2])
    if minor not in OLDER:
        return share is None or NEWEST in share
    if quick and module == QUICK_WITH_EACH:
        return True
    by_turns = share is None or (quick and module.startswith(QUICK_BY_TURNS))
    return minor in (share or ()) or (by_turns and minor == _turn(module, _older_ones_of(Path(module))))


@cache
def runs_without_megatron(file: Path) -> bool:
    """Return whether no test of a module needs torch or Megatron, and tox runs it without them."""
    with_torch = file.is_relative_to(TESTS / "patches") or file.is_relative_to(TESTS / "testing")
    return not with_torch and reason_to_skip(file, HOW_TO_GET) is None and not _marks(file)


def with_other_releases(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests with releases of a framework but a module's one, and with shapes that are not its turn."""
    by_module = collections.defaultdict(lambda: collections.defaultdict(list))
    for item in items:
        for name, value in item.callspec.params.items() if hasattr(item, "callspec") else ():
            if name == "shape" or hasattr(value, "ranks_of"):  # a Release; its module imports torch
                by_module[item.path, name == "shape"][getattr(value, "name", value)].append(item)
    left_out = set()
    for (path, of_shapes), by_name in by_module.items():
        taken = _turn(path.stem, list(by_name)[::-1]) if of_shapes else _release_of(path, by_name)
        left_out.update(item for name, tests in by_name.items() if name != taken for item in tests)
    return left_out


def _release_of(path: Path, tests: dict[str, list]) -> str:
    """Return the newest release that needs a module's patch, by docs/verdicts.csv.

    Where none does, or the module is of several patches, the newest of those with most of its tests.
    """
    needing = set().union(*_needing()[_patch_of(path)].values())
    newest_first = reversed(tests)  # they come in order
    return max(newest_first, key=lambda name: (name.replace("_", "-") in needing, len(tests[name])))


def _patch_of(path: Path) -> str:
    """Return the name, with hyphens alone, of the patch that a module of tests has its name from."""
    return f"{path.parent.name}.{path.stem.removeprefix('test_')}".replace("_", "-")


@cache
def _needing() -> dict[str, dict[str, set[str]]]:
    """Return the releases that need a patch, as ``skyrl-train-0.3.1``, by its name with hyphens and by site."""
    found: dict[str, dict[str, set[str]]] = collections.defaultdict(dict)
    for (patch, module), cells in table.read(table.FILE.read_text()).items():
        releases = {f"{project_of(module)}-{name}" for name, cell in cells.items() if cell.verdict == "needed"}
        found[patch.replace("_", "-")][module] = releases
    return found


@cache
def _older_ones_of(path: Path) -> Sequence[str]:
    """Return the older Megatrons that a module may run with: those with a defect that the newest lacks."""
    found = set()
    for releases in _needing()[_patch_of(path)].values():
        minors = {minor for minor in EACH if any(name.startswith(f"megatron-core-{minor}.") for name in releases)}
        found |= set() if NEWEST in minors else minors
    return sorted(found) or OLDER


def with_nightly(cases: list, in_ci: Collection[object] = ()) -> list:
    """Return cases as parameters of a test: five of six are left to the night, or all but those named."""
    taken = [case in in_ci if in_ci else number % 6 == 0 for number, case in enumerate(cases)]
    marks = [() if is_taken else pytest.mark.nightly for is_taken in taken]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case, mark in zip(cases, marks, strict=True)
    ]


def chosen(request: pytest.FixtureRequest, *names: str) -> set:
    """Return the values of these parameters, of all tests of the fixture's module that run."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    values = [tuple(item.callspec.params.get(name) for name in names) for item in items]
    return {value if len(names) > 1 else value[0] for value in values}


def _turn(module: str, choices: Sequence[Choice]) -> Choice:
    """Return a module's choice, by its own name: a new module does not change those of the others."""
    return choices[zlib.crc32(module.encode()) % len(choices)]


def _marks(file: Path) -> set[str]:
    return {name for module, name in _imports(file, at_import=True) if module == __name__ and "needs_" in name}


def _needs(file: Path, at_import: bool) -> set[str]:
    """Return what the file and all rigs under it import: when they are imported, or at any time."""
    seen = {Path(__file__)}
    found: set[str] = set()
    todo = [file]
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        for module, name in _imports(file, at_import):
            top = module.partition(".")[0]
            if top == "torch" or module.startswith("megapatch.testing"):
                found.add(TORCH)
            if top == "megatron" or (module == "megapatch.testing" and name in OF_TESTING and not at_import):
                found.add(MEGATRON)
            todo += [path for path in map(_file, (module, f"{module}.{name}")) if path]
    return found


@cache
def _imports(file: Path, at_import: bool) -> frozenset[tuple[str, str]]:
    """Return (module, name) of what the file imports; `at_import` leaves out what functions import."""
    return frozenset(_statements(ast.parse(file.read_text()), at_import))


def _statements(tree: ast.AST, at_import: bool) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)
        elif not (at_import and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))):
            yield from _statements(node, at_import)


@cache
def _file(module: str) -> Path | None:
    """Return the file of a module of the tests, or None."""
    path = TESTS.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
