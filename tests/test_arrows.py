"""Which room may import which: every arrow points down, and no two modules import each other.

Read from the source, so that imports in functions count as well. Imports under TYPE_CHECKING point down, too; only
between modules of one room may they close a circle, as nothing is loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import megapatch

ROOT = Path(megapatch.__file__).parent

# A room may import the rooms of the lines above its own.
LEVELS = (
    {"errors", "_version", "_python", "_meetings", "_printable", "_ranks", "_troubleshooting"},
    {"patch", "_exact_version", "_versions", "_mcore", "_pausing"},
    {"weight_sync", "train_step"},
    {"patches"},
    {"_engine"},
    {"_reporting"},
    {"audit"},
    {"_api"},
    {"streaming", "testing"},
    {"_verify"},
    {"reach"},
    {"_cli"},
    {"__init__"},
    {"__main__"},
)
# Code that travels by value to other processes, or runs in every Python, imports the package by its name.
BY_NAME = ("megapatch.reach.ray", "megapatch.reach._run.site.sitecustomize")


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        dotted = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        found[dotted.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, at_run_time: bool = False) -> Iterator[str]:
    """The modules of megapatch that a module imports."""
    known = modules()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    skipped = {
        id(below)
        for node in ast.walk(tree)
        if at_run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for below in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                yield from [f"{source}.{alias.name}"] if f"{source}.{alias.name}" in known else ()
            if source in known and not all(f"{source}.{alias.name}" in known for alias in node.names):
                yield source


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_every_room_has_its_level():
    assert {room(name) for name in modules()} == set().union(*LEVELS)


def test_every_arrow_points_down():
    level = {name: number for number, rooms in enumerate(LEVELS) for name in rooms}
    wrong = []
    for name, path in modules().items():
        for target in imports(name, path):
            start, end = room(name), room(target)
            by_name = target == "megapatch" and name in BY_NAME
            if start != end and level[end] >= level[start] and not by_name:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle():
    arrows = {
        name: {target for target in imports(name, path, at_run_time=True) if target not in (name, "megapatch")}
        for name, path in modules().items()
    }
    # A package's __init__ collects its modules, and they may import each other through the package's parts.
    while leaves := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"these import each other: {arrows}"
