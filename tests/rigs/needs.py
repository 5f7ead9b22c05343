"""Which tests need torch or Megatron, and what they are skipped with where it is not installed.

A module is skipped as a whole if importing it would import what is not installed, or if it, or a rig that it uses,
imports Megatron anywhere: most jobs import Megatron in their ranks. A module with tests of both kinds marks those
that need Megatron with `needs_megatron`; then only its own imports count.

Only absence skips: what is installed and cannot be imported fails. With MEGATRON_REQUIRED set, absence is an error
(tests/conftest.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megapatch._python.finding import find_module

TESTS = Path(__file__).parent.parent
TORCH, MEGATRON = "torch", "megatron.core"
HOW_TO_GET = {
    TORCH: "needs torch, which is not installed here: pip install torch",
    MEGATRON: "needs megatron-core, which is not installed here: pip install --no-deps megatron-core, with torch, "
    "numpy, einops, psutil and pyyaml; or put a checkout of Megatron-LM on PYTHONPATH",
}
# These import Megatron when they are called.
OF_TESTING = {"MegatronLoop", "destroy_parallel", "init_parallel", "tiny_gpt"}


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
    by_test = ("rigs.needs", "needs_megatron") in _imports(file, at_import=True)
    if file.name != "conftest.py" and not by_test:
        needed |= _needs(file, at_import=False) & {MEGATRON}
    return next((reason for name, reason in absent.items() if name in needed), None)


@cache
def runs_without_megatron(file: Path) -> bool:
    """Return whether no test of a module needs torch or Megatron."""
    by_test = {("rigs.needs", "needs_megatron"), ("rigs.needs", "needs_torch")} & _imports(file, at_import=True)
    return reason_to_skip(file, HOW_TO_GET) is None and not by_test


@cache
def uses_torch(file: Path) -> bool:
    """Return whether a module of tests, a rig that it uses or a conftest.py above it imports torch at any time."""
    above = [folder / "conftest.py" for folder in file.parents if folder.is_relative_to(TESTS)]
    return any(_needs(path, at_import=False) for path in [file, *above] if path.exists())


def _needs(file: Path, at_import: bool) -> set[str]:
    """Return what the file and all rigs under it import: when they are imported, or at any time."""
    seen: set[Path] = set()
    found: set[str] = set()
    todo = [file]
    while todo:
        file = todo.pop()
        if file in seen or file == Path(__file__):
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
