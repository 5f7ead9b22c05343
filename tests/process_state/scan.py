"""State of the process in a package's sources: found by reading, without an import."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

CACHES = {"alru_cache", "cache", "lru_cache"}
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
CONTAINERS = {"ContextVar", "Counter", "OrderedDict", "Queue", "SimpleQueue", "WeakKeyDictionary", "WeakSet"}
CONTAINERS |= {"WeakValueDictionary", "defaultdict", "deque", "dict", "list", "local", "set"}
MUTATING = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem"}
MUTATING |= {"popleft", "put", "putenv", "remove", "set", "setdefault", "update"}
ARGUMENTS = {"args", "cfg"}
"""Names by which functions, and objects, know settings that all share: arguments, and Bridge's configuration."""
FOREIGN = {"megatron", "torch", "transformer_engine"}
"""Packages whose attributes others write."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORT = "import"  # as a writer


class Entry(NamedTuple):
    """Something that outlives a model."""

    module: str
    name: str
    kind: str
    line: int = 0  # of its definition; of the first place that writes it where that is elsewhere
    writers: tuple[str, ...] = ()


class Source(NamedTuple):
    """A module's tree, and what its names stand for."""

    module: str
    tree: ast.Module
    values: dict[str, ast.expr]  # module-level names that are assigned
    defined: dict[str, ast.AST]  # its functions and classes
    imported: dict[str, str]  # name: dotted path


def scan(folder: Path, packages: Iterable[str]) -> list[Entry]:
    """Return the entries of the packages' modules, which are in the folder as on a path of Python's."""
    sources = {source.module: source for package in packages for source in _sources(folder, package)}
    made = {_called(value) for source in sources.values() for value in source.values.values()}
    defined = (
        (name, node) for source in sources.values() for name, node in source.defined.items() if name in made
    )
    stateful = {name for name, node in defined if _writes_self(node)}
    found: dict[tuple[str, str, str], Entry] = {}
    for source in sources.values():
        for entry in (*_made_on_import(source, stateful), *_written(source, sources)):
            key = entry[:3]
            lines = [one.line for one in (found.get(key), entry) if one and one.line]
            writers = {*entry.writers, *(found[key].writers if key in found else ())}
            found[key] = Entry(*key, min(lines, default=0), tuple(sorted(writers)))
    return sorted(found.values())


def _sources(folder: Path, package: str) -> Iterator[Source]:
    path = folder / package.replace(".", "/")
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
        if file.is_file():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(file.read_bytes())
            parts = file.relative_to(folder).with_suffix("").parts
            yield _source(".".join(parts).removesuffix(".__init__"), parts[-1] == "__init__", tree)


def _source(module: str, is_package: bool, tree: ast.Module) -> Source:
    source = Source(module, tree, {}, {}, {})
    for node in _own(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            source.defined.setdefault(node.name, node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            source.values.update((name, node.value or node) for name in _targets(node))
    for node in _own(tree, everywhere=True):
        if isinstance(node, ast.Import):
            source.imported.update((one.asname, one.name) for one in node.names if one.asname)
            source.imported.update((one.name.partition(".")[0],) * 2 for one in node.names if not one.asname)
        elif isinstance(node, ast.ImportFrom):
            up = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            source.imported.update((one.asname or one.name, f"{base}.{one.name}") for one in node.names)
    return source


def _own(node: ast.AST, everywhere: bool = False) -> Iterator[ast.AST]:
    """Yield what a function consists of, without the functions in it; of expressions only the outermost."""
    for one in ast.iter_child_nodes(node):
        yield one
        if not isinstance(one, ast.expr) and (everywhere or not isinstance(one, (*FUNCTIONS, ast.ClassDef))):
            yield from _own(one, everywhere)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}{node.name}" if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else prefix
        if isinstance(node, FUNCTIONS):
            yield name, node
        if not isinstance(node, (ast.expr, ast.arguments)):
            yield from _functions(node, f"{name}." if name != prefix else prefix)


def _targets(node: ast.AST) -> list[str]:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _called(node: ast.AST | None) -> str:
    """Return the last name of what an expression calls or names."""
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_container(node: ast.AST | None) -> bool:
    return isinstance(node, DISPLAYS) or (isinstance(node, ast.Call) and _called(node) in CONTAINERS)


def _writes_self(node: ast.AST) -> bool:
    """Return whether a class has a method besides its constructor that writes an attribute of its instance."""
    changes = (path for name, method in _functions(node) if name != "__init__" for path, _ in _changes(method))
    return isinstance(node, ast.ClassDef) and any(path[0] == "self" for path in changes)


def _made_on_import(source: Source, stateful: set[str]) -> Iterator[Entry]:
    """Yield functions that keep answers, and instances of classes that change themselves."""
    for name, node in _functions(source.tree):
        if CACHES & set(map(_called, node.decorator_list)):
            yield Entry(source.module, name, "cache", node.lineno)
    for name, value in source.values.items():
        if isinstance(value, ast.Call) and _called(value) in CACHES | stateful:
            kind = "object" if _called(value) in stateful else "cache"
            yield Entry(source.module, name, kind, value.lineno)


# ---------------------------------------------------------------- what is written
def _changes(node: ast.AST) -> Iterator[tuple[tuple[str, ...], ast.AST]]:
    """Yield the path of names of what a function, without those in it, assigns, deletes or changes in place."""
    for one in _own(node):
        targets = getattr(one, "targets", [])
        if isinstance(one, (ast.AugAssign, ast.AnnAssign, ast.For)):
            targets = [one.target]
        elif isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in MUTATING:
            if path := _path(one.func.value):
                yield (*path, "[]"), one
        elif isinstance(one, ast.Call) and _called(one) in ("setattr", "delattr") and len(one.args) > 1:
            yield (*_path(one.args[0]), _constant(one.args[1])), one
        for target in targets:
            for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                if path := _path(part):
                    yield path, part


def _path(node: ast.AST) -> tuple[str, ...]:
    """Return a chain of names, with "[]" for an item, and "name()" for a call; () if its root has no name."""
    if isinstance(node, ast.Name):
        return (node.id,)
    inner = getattr(node, "value", None) or getattr(node, "func", None)
    path = _path(inner) if inner else ()
    if isinstance(node, ast.Attribute) and path:
        return ("cls",) if (*path, node.attr) == ("self", "__class__") else (*path, node.attr)
    if isinstance(node, ast.Subscript) and path:
        return (*path, "[]")
    if isinstance(node, ast.Call) and path:
        if path == ("type",) and len(node.args) == 1:
            return ("cls",) if _path(node.args[0]) == ("self",) else ()
        return ("args",) if path[-1] == "get_args" else (*path[:-1], f"{path[-1]}()")
    return ()


def _constant(node: ast.AST) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "*"


def _written(source: Source, sources: dict[str, Source]) -> Iterator[Entry]:
    for where, function in ((IMPORT, source.tree), *_functions(source.tree)):
        own = list(_own(function))
        shared = {name for one in own if isinstance(one, ast.Global) for name in one.names}
        assigned = [(_path(one.targets[0]), _path(one.value)) for one in own if isinstance(one, ast.Assign)]
        aliases = {to[0]: path for to, path in assigned if len(to) == 1 and path and to[0] not in ARGUMENTS}
        changes = [
            ((*aliases.get(path[0], path[:1]), *path[1:]) if path[1:] else path, node)
            for path, node in _changes(function)
        ]
        local = {one.arg for one in ast.walk(getattr(function, "args", function)) if isinstance(one, ast.arg)}
        local |= {path[0] for path, _ in changes if len(path) == 1} - shared
        for path, node in changes:
            entry = _entry(source, sources, where, path, node, shared, local)
            if entry and (where != IMPORT or entry.kind == "environment"):
                yield entry._replace(line=entry.line or node.lineno, writers=(f"{source.module}.{where}",))


def _entry(source, sources, where, path, node, shared, local) -> Entry | None:
    """Return the entry that a change of a path by a function is one of."""
    if path[0] == "self" and path[1:2] and path[1] in ARGUMENTS and path[2:]:
        path = path[1:]
    root, names = path[0], [part for part in path[1:] if part != "[]"]
    if any(part.endswith("()") for part in names):  # of what a method returns, such as a copy
        return None
    if root in ARGUMENTS and names:
        return Entry(source.module, ".".join([root, *names]), "argument")
    holder = where.rpartition(".")[0].rpartition(".")[2]
    if root in ("cls", "self") and holder in source.defined and names:
        return _of_class(source, holder, names[0], is_own=root == "self")
    if root not in shared and (root in local or len(path) == 1):
        return None
    dotted = ".".join([source.imported.get(root.removesuffix("()"), ""), *names])
    if dotted == "os.environ" or (dotted == "os" and _called(node) == "putenv"):
        key = node.slice if isinstance(node, ast.Subscript) else next(iter(node.args), None)
        return Entry(source.module, _constant(key), "environment", node.lineno)
    owner = next((name for name in _beginnings(dotted) if name in sources), None)
    if root.removesuffix("()") not in source.imported or root in shared:
        names = [root, *names]
    elif owner is not None:
        source, names = sources[owner], dotted[len(owner) + 1 :].split(".")
    else:
        is_known = names and not root.endswith("()") and dotted.partition(".")[0] in FOREIGN
        return Entry(source.module, dotted, "foreign") if is_known else None
    if root.endswith("()"):
        names[0] = _returned(source, names[0].removesuffix("()"))
    value, made = source.values.get(names[0]), source.defined.get(names[0])
    if isinstance(made, ast.ClassDef):
        return _of_class(source, names[0], names[1]) if names[1:] else None
    if made is not None:
        return Entry(source.module, ".".join(names[:2]), "function attribute", made.lineno) if names[1:] else None
    if value is None and ((root not in shared and owner is None) or not names[0]):
        return None
    kind = "container" if len(path) > 1 and _is_container(value) else "global"
    return Entry(source.module, names[0], kind, getattr(value, "lineno", 0))


def _returned(source: Source, function: str) -> str:
    """Return the module-level name that a function returns, or ""."""
    returns = [one.value for one in _own(source.defined.get(function, ast.Pass())) if isinstance(one, ast.Return)]
    return next((one.id for one in returns if isinstance(one, ast.Name) and one.id in source.values), "")


def _beginnings(dotted: str) -> Iterator[str]:
    while "." in dotted:
        dotted = dotted.rpartition(".")[0]
        yield dotted


def _of_class(source: Source, name: str, attribute: str, is_own: bool = False) -> Entry | None:
    """Return the entry of a class's attribute. An instance changes it where it is a container, and not its own."""
    node = source.defined[name]
    value = next((one.value for one in node.body if attribute in _targets(one)), None)
    assigned = (path for _, method in _functions(node) for path, _ in _changes(method))
    if is_own and (not _is_container(value) or ("self", attribute) in assigned):
        return None
    return Entry(source.module, f"{name}.{attribute}", "class attribute", getattr(value, "lineno", 0))
