"""The signature and docstring of a promised name, as Markdown that GitHub and the site show."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from .limits import markdown

WIDTH = 100
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
SHOWN_DECORATORS = {"property", "classmethod", "staticmethod", "contextlib.contextmanager"}


def section(name: str, node: ast.AST) -> Iterator[str]:
    """Yield the blocks about a function, or about a class and its public methods."""
    assert isinstance(node, (ast.ClassDef, *Function))
    yield from _entry(f"### {name}", node)
    if isinstance(node, ast.ClassDef):
        for method in node.body:
            if isinstance(method, Function) and not method.name.startswith("_"):
                yield from _entry(f"#### {name}.{method.name}", method)


def _entry(heading: str, node: ast.AST) -> Iterator[str]:
    yield heading
    yield f"```python\n{signature(node)}\n```"
    yield from text(ast.get_docstring(node) or "")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- signatures
def signature(node: ast.AST) -> str:
    """Return the code that declares a function, or a class with its fields or its constructor."""
    if isinstance(node, ast.ClassDef):
        promised = [base for each in node.bases if not (base := ast.unparse(each)).startswith("_")]
        bases = f"({', '.join(promised)})" if promised else ""
        return f"class {node.name}{bases}:\n{_indented(_inside(node) or ['...'])}"
    assert isinstance(node, Function)
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = list(_arguments(node.args))
    line = f"{kind} {node.name}({', '.join(arguments)}){returns}: ..."
    if len(line) > WIDTH:
        each = "".join(f"    {argument},\n" for argument in arguments)
        line = f"{kind} {node.name}(\n{each}){returns}: ..."
    decorators = [found for each in node.decorator_list if (found := ast.unparse(each)) in SHOWN_DECORATORS]
    return "\n".join([*(f"@{decorator}" for decorator in decorators), line])


def _inside(node: ast.ClassDef) -> list[str]:
    for found in node.body:
        if isinstance(found, ast.FunctionDef) and found.name == "__init__":
            return signature(found).splitlines()
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return [ast.unparse(each) for each in fields if not ast.unparse(each.target).startswith("_")]


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    without = len(positional) - len(arguments.defaults)
    for number, argument in enumerate(positional):
        yield _argument(argument, arguments.defaults[number - without] if number >= without else None)
        if number + 1 == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg or arguments.kwonlyargs:
        yield f"*{ast.unparse(arguments.vararg)}" if arguments.vararg else "*"
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(argument, default)
    if arguments.kwarg:
        yield f"**{ast.unparse(arguments.kwarg)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(argument)
    equals = " = " if argument.annotation else "="
    return f"{ast.unparse(argument)}{equals}{ast.unparse(default)}"


# ------------------------------------------------------------------------------------------- docstrings
def text(docstring: str) -> Iterator[str]:
    """Yield the blocks of a docstring: paragraphs, lists of what has a label, and Google's sections."""
    for block in re.split(r"\n\s*\n", docstring):
        heading, _, rest = block.partition("\n")
        lines = textwrap.dedent(rest).splitlines()
        if re.fullmatch(r"(Args|Attributes|Raises):", heading):
            yield f"**{heading}**"
            yield _items(_entries(lines))
        elif re.fullmatch(r"(Returns|Yields):", heading):
            yield f"**{heading}** {_joined(lines)}"
        elif block.startswith("    "):
            yield f"```text\n{textwrap.dedent(block)}\n```"
        elif labels := _labelled(block.splitlines()):
            yield _items(labels)
        else:
            yield _joined(block.splitlines())


def _joined(lines: list[str]) -> str:
    return markdown(" ".join(line.strip() for line in lines))


def _items(entries: list[tuple[str, list[str]]]) -> str:
    return "\n".join(f"- {label}: {_joined(lines)}" for label, lines in entries)


def _entries(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Return the labels and texts of lines such as `label: text`, which go on in indented lines."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(" ") and found:
            found[-1][1].append(line)
        else:
            label, _, rest = line.partition(": ")
            found.append((f"`{label}`", [rest]))
    return found


def _labelled(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Return the labels and texts of lines whose texts stand below each other; none where it is a paragraph."""
    depths = {len(line) - len(line.lstrip()) for line in lines} - {0}
    if len(depths) != 1:
        return []
    (depth,) = depths
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(" "):
            found[-1][1].append(line)
        else:
            found.append((f"**{line[:depth].strip()}**", [line[depth:]]))
    return found
