"""docs/api.md lists every promised name. It is read from the sources without importing them, so that no torch is
needed."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import megapatch

PACKAGE = Path(megapatch.__file__).parent

INTRODUCTION = """\
<!-- Generated from the sources: `cd tests && python -m pages` -->

# API

megapatch promises the names on this page: dotted names without a leading underscore, which work after
`import megapatch`. Everything below a name with an underscore may change without notice. `help()` shows signatures
and docstrings.

The patches are promised by name (`megatron.train-reentry`, see [Limits](limits.md)), and so is `PATCH` in the
module of each, such as `megapatch.patches.megatron.train_reentry.PATCH`. The functions in those modules are not.
"""

MODULES = (
    "megapatch",
    "megapatch.errors",
    "megapatch.patch",
    "megapatch.patches",
    "megapatch.train_step",
    "megapatch.weight_sync",
    "megapatch.audit",
    "megapatch.streaming",
    "megapatch.streaming.nemo_rl",
    "megapatch.streaming.skyrl",
    "megapatch.streaming.slime",
    "megapatch.reach",
    "megapatch.reach.ray",
    "megapatch.testing",
)
"""In the order of the page. test_pages.py compares them with the modules that there are."""

WITHOUT_DOCSTRING = {
    "PATCHES": "All patches of megapatch's own, in the order in which they are considered.",
    "__version__": "The version, as a string.",
}


class Definition(NamedTuple):
    """Where a name is defined, and the first sentence about it. A module is defined in itself, as ``""``."""

    module: str
    name: str
    summary: str


def page() -> str:
    """Return the whole page of names."""
    parts = [INTRODUCTION]
    for module in MODULES:
        rows = "\n".join(
            row(name, definition(module, name).summary or WITHOUT_DOCSTRING[name]) for name in names(module)
        )
        parts.append(f"## {module}\n\n| name | |\n| --- | --- |\n{rows}")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def row(name: str, summary: str) -> str:
    text = summary.replace("|", "\\|")
    return f"| `{name}` | {text} |"


def names(module: str) -> list[str]:
    """Return the names that a module promises: its ``__all__``, or its own without an underscore."""
    defined: list[str] = []
    for node in parsed(module).body:
        for name in _bound(node):
            if name == "__all__":
                value = node.value  # type: ignore[attr-defined]
                return [str(element.value) for element in value.elts]
            if not name.startswith("_") and not isinstance(node, (ast.Import, ast.ImportFrom)):
                defined.append(name)
    return defined


@cache
def definition(module: str, name: str) -> Definition:
    """Follow imports to where a name is defined."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    source = _absolute(module, node)
                    if _path(f"{source}.{alias.name}"):
                        return Definition(
                            f"{source}.{alias.name}", "", summary_of(parsed(f"{source}.{alias.name}"))
                        )
                    return definition(source, alias.name)
    body = parsed(module).body
    for number, node in enumerate(body):
        if name in _bound(node):
            following = body[number + 1] if number + 1 < len(body) else None
            return Definition(module, name, summary_of(node, following))
    raise LookupError(f"{module} has no {name}")


def summary_of(node: ast.AST, following: ast.AST | None = None) -> str:
    """The first sentence of a docstring, or of the string below a constant."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node) or ""
    else:
        value = following.value if isinstance(following, ast.Expr) else None
        text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0]


@cache
def parsed(module: str) -> ast.Module:
    path = _path(module)
    assert path is not None, module
    return ast.parse(path.read_text())


def _bound(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _absolute(module: str, node: ast.ImportFrom) -> str:
    path = _path(module)
    assert path is not None
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *(node.module.split(".") if node.module else [])])


def _path(module: str) -> Path | None:
    base = PACKAGE.joinpath(*module.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None
