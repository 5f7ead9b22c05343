"""Which room may import which: every arrow points down, and no two modules import each other.

Read from the source, so that imports in functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import megapatch

ROOT = Path(megapatch.__file__).parent

# A room may import the rooms of the lines above its own.
LEVELS = (
    {"errors", "_version", "_python", "_printable", "_ranks"},
    {"patch", "_versions", "_mcore", "_pausing"},
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


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        dotted = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        found[dotted.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path) -> Iterator[str]:
    """The modules of megapatch that a module imports."""
    known = modules()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
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


def test_the_ground_floor_is_few_ideas():
    assert len([path for path in ROOT.iterdir() if path.name != "__pycache__"]) <= 24


def test_the_page_names_every_room():
    """And none that is gone."""
    page = (
        (Path(__file__).parents[1] / "docs/architecture.md")
        .read_text()
        .partition("## The rooms")[2]
        .partition("\n## ")[0]
    )
    cells = "".join(re.findall(r"^\| (`megapatch/.*?) \|", page, re.MULTILINE))
    named = set(re.findall(r"`megapatch/(\w+)(?:/|\.py)`", cells))
    assert named == set().union(*LEVELS) - {"__init__", "__main__"}


def test_every_arrow_points_down():
    level = {name: number for number, rooms in enumerate(LEVELS) for name in rooms}
    wrong = []
    for name, path in modules().items():
        for target in imports(name, path):
            start, end = room(name), room(target)
            if start != end and level[end] >= level[start]:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle():
    arrows = {
        name: {target for target in imports(name, path) if target not in (name, "megapatch")}
        for name, path in modules().items()
    }
    # A package's __init__ collects its modules, and they may import each other through the package's parts.
    while leaves := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"these import each other: {arrows}"
