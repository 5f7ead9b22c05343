"""Find the mutations of a source file: small changes of its text, each of which should break a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: (r"is(?!\s+not)", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}
# Texts for people, and what only a type checker reads.
NOT_MUTATED = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)
LOGS = re.compile(r"^_?(log|logger|logging)\.|^print$")
# A lock is missed once in a thousand runs only. A swap of these arguments always raises, whatever the tests are.
LOCKS = re.compile(r"lock|condition", re.IGNORECASE)
RAISE_WHEN_SWAPPED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "delattr"}
TEXTS_OF_A_PATCH = {"doc", "upstream", "name"}


@dataclass(frozen=True)
class Mutation:
    """The characters of a file from `start` to `end` become `new`."""

    path: str
    function: str  # the qualified name of what it is in; "" for the module
    line: int
    start: int
    end: int
    new: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]

    def change(self, source: str) -> tuple[str, ...]:
        """Return the lines that it removes and adds, without indentation: "- old", "+ new"."""
        first, last = source.count("\n", 0, self.start), source.count("\n", 0, self.end)
        old, new = source.splitlines(), self.apply(source).splitlines()
        after = len(old) - last - 1
        removed = [f"- {line.strip()}" for line in old[first : last + 1]]
        return (*removed, *(f"+ {line.strip()}" for line in new[first : len(new) - after]))


def mutations(path: str, source: str) -> list[Mutation]:
    """Return the mutations of a file that compile, and not to the same, in the order of its lines."""
    tree = ast.parse(source)
    plain = ast.dump(tree)
    found = {}
    for mutation in _Finder(path, source).of(tree, ""):
        text = mutation.apply(source)
        try:
            if ast.dump(ast.parse(text)) != plain:
                compile(text, path, "exec", dont_inherit=True)
                found[text] = mutation
        except SyntaxError:
            continue
    return sorted(found.values(), key=lambda one: (one.start, one.end, one.new))


class _Finder:
    def __init__(self, path: str, source: str) -> None:
        self.path = path
        self.source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def of(self, node: ast.AST, function: str) -> Iterator[Mutation]:
        if isinstance(node, NOT_MUTATED) or _is_typing(node):
            return
        if isinstance(node, ast.Call) and LOGS.search(ast.unparse(node.func)):
            return
        if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
            return
        if isinstance(node, ast.Assign) and function.endswith("__init__"):
            return  # the first use raises
        here = function
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            here = f"{function}.{node.name}".lstrip(".")
        for start, end, new in self._changes_of(node):
            yield Mutation(self.path, function, self.source.count("\n", 0, start) + 1, start, end, new)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.of(child, here)

    def _changes_of(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        changes = getattr(self, f"_of_{type(node).__name__}", None)
        if changes is not None:
            yield from changes(node)

    def _at(self, line: int, column: int) -> int:
        """Return the place in the source of what ast gives in UTF-8 bytes of a line."""
        text = self.source[self._lines[line - 1] : self._lines[line]]
        return self._lines[line - 1] + len(text.encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end]

    def _between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[tuple[int, int, str]]:
        start, end = self._span(left)[1], self._span(right)[0]
        if match := re.search(old, self.source[start:end]):
            yield start + match.start(), start + match.end(), new

    def _whole(self, node: ast.AST, new: str) -> tuple[int, int, str]:
        return (*self._span(node), new)

    def _of_Compare(self, node: ast.Compare) -> Iterator[tuple[int, int, str]]:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            yield from self._between(left, right, *COMPARISONS[type(operator)])

    def _of_BoolOp(self, node: ast.BoolOp) -> Iterator[tuple[int, int, str]]:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from self._between(left, right, rf"\b{old}\b", new)
        for dropped in node.values:
            kept = [f"({self._text(value)})" for value in node.values if value is not dropped]
            yield self._whole(node, f" {old} ".join(kept))

    def _of_UnaryOp(self, node: ast.UnaryOp) -> Iterator[tuple[int, int, str]]:
        if isinstance(node.op, ast.Not):
            yield self._whole(node, f"bool({self._text(node.operand)})")

    def _of_BinOp(self, node: ast.BinOp) -> Iterator[tuple[int, int, str]]:
        texts = (ast.JoinedStr, ast.List, ast.Tuple)
        is_text = any(isinstance(one, texts) or _is_text(one) for one in (node.left, node.right))
        if not is_text and type(node.op) in ARITHMETIC:
            yield from self._between(node.left, node.right, *ARITHMETIC[type(node.op)])

    def _of_Constant(self, node: ast.Constant) -> Iterator[tuple[int, int, str]]:
        if isinstance(node.value, bool):
            yield self._whole(node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            yield self._whole(node, repr(node.value + 1))

    def _of_If(self, node: ast.If) -> Iterator[tuple[int, int, str]]:
        yield self._whole(node.test, f"not ({self._text(node.test)})")
        yield self._whole(node.test, "False")

    def _of_IfExp(self, node: ast.IfExp) -> Iterator[tuple[int, int, str]]:
        yield self._whole(node.test, f"not ({self._text(node.test)})")

    def _of_While(self, node: ast.While) -> Iterator[tuple[int, int, str]]:
        yield self._whole(node.test, "False")

    def _of_comprehension(self, node: ast.comprehension) -> Iterator[tuple[int, int, str]]:
        for test in node.ifs:
            yield self._whole(test, "True")

    def _of_Try(self, node: ast.Try) -> Iterator[tuple[int, int, str]]:
        bodies = [*(handler.body for handler in node.handlers), node.finalbody]
        for body in bodies:
            if len(body) > 1:
                yield self._span(body[0])[0], self._span(body[-1])[1], "pass"

    def _of_With(self, node: ast.With) -> Iterator[tuple[int, int, str]]:
        if len(node.items) == 1 and node.items[0].optional_vars is None:
            manager = node.items[0].context_expr
            if not LOCKS.search(ast.unparse(manager)):
                yield self._span(node)[0], self._span(manager)[1], "if True"

    def _of_Call(self, node: ast.Call) -> Iterator[tuple[int, int, str]]:
        first, *more = node.args or [None]
        starred = any(isinstance(one, ast.Starred) for one in (first, *more))
        if more and not starred and ast.unparse(node.func) not in RAISE_WHEN_SWAPPED:
            start, end = self._span(first)[0], self._span(more[0])[1]
            between = self.source[self._span(first)[1] : self._span(more[0])[0]]
            yield start, end, self._text(more[0]) + between + self._text(first)
        for keyword in node.keywords:
            if keyword.arg not in TEXTS_OF_A_PATCH:
                start, end = self._span(keyword)
                rest = re.match(r"\s*,\s*", self.source[end:])
                yield start, end + (rest.end() if rest else 0), ""

    # Statements that are removed:

    def _of_Expr(self, node: ast.Expr) -> Iterator[tuple[int, int, str]]:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call) and not LOGS.search(ast.unparse(value.func)):
            yield self._whole(node, "pass")

    def _of_Assign(self, node: ast.Assign) -> Iterator[tuple[int, int, str]]:
        if isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            yield self._whole(node, "pass")

    def _of_AugAssign(self, node: ast.AugAssign) -> Iterator[tuple[int, int, str]]:
        yield self._whole(node, "pass")
        if type(node.op) in ARITHMETIC and not _is_text(node.value):
            old, new = ARITHMETIC[type(node.op)]
            yield from self._between(node.target, node.value, old, new)

    def _removed(self, node: ast.stmt) -> Iterator[tuple[int, int, str]]:
        yield self._whole(node, "pass")

    _of_Delete = _of_Continue = _of_Break = _removed

    def _of_Return(self, node: ast.Return) -> Iterator[tuple[int, int, str]]:
        if node.value is None:
            yield self._whole(node, "pass")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_typing(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "TypeVar", "ParamSpec", "overload")
