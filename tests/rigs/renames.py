"""Upstream's names under other names: each one that a patch looks at, one after the other.

A patch looks at the names in its own code, in texts and as attributes. They are looked for in the modules of its
sites, in what these modules hold by such names, and in the code of the functions there.

An edit is a function of the syntax tree of a function's definition: it changes the tree, and returns whether it
found anything to change.
"""

from __future__ import annotations  # compile() inherits it

import ast
import contextlib
import importlib
import inspect
import re
import sys
import textwrap
import warnings
from functools import cache
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from unittest import mock

from megapatch._python.dotted import find
from megapatch.patch import ABSENT, FIXED, NEEDED
from megapatch.patches._catalogue import CATALOGUE, of_name
from rigs.chosen import all_are_chosen, chosen
from rigs.imported import run_with_megatron

BESIDE = ("megapatch.patches.", "megapatch._mcore.")
"""Where the modules are that a patch is made of."""


def assert_renames_are_seen(family, at_least, **options):
    """Fail if a renamed name ends as "not needed", or if fewer renames than that could be tried."""
    names = chosen(CATALOGUE[family], name=str)
    ((tried, unseen),) = run_with_megatron(_unseen_renames, 1, names, **options)
    assert not unseen, "\n".join(unseen)
    assert tried >= (at_least if all_are_chosen() else 1), tried


def _unseen_renames(rank, world_size, names):
    """Return how many renames were tried with these patches, and those that end as "not needed"."""
    tried, unseen = 0, []
    for patch in map(of_name, names):
        for site in patch.sites:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is not installed
                with contextlib.suppress(ImportError):
                    importlib.import_module(site.module)
                module = sys.modules.get(site.module)
                if module is None or site.diagnose(module).kind is not NEEDED:
                    continue
                for change, renamed in _renames(module, names_in(patch)):
                    with renamed:
                        verdict = _verdict(site, module)
                    tried += 1
                    if verdict is not None and verdict.kind in (FIXED, ABSENT):
                        unseen.append(f"{patch.name}, {change}: {verdict.kind.value}, {verdict.reason}")
                assert site.diagnose(module).kind is NEEDED, f"{patch.name}: a rename was not taken back"
    return tried, unseen


def _verdict(site, module):
    try:
        return site.diagnose(module)
    except Exception:
        return None  # the engine says `failed`, loudly


def names_in(patch):
    """Return the identifiers in the code of a patch, and of the modules beside it that it is made of."""
    name = f"megapatch.patches.{patch.family}.{patch.name.partition('.')[2].replace('-', '_')}"
    return {word for module in _made_of(name) for word in _identifiers(module)}


def _made_of(name):
    """Return the names of a module and of all that it imports of megapatch.patches and megapatch._mcore."""
    found, queue = set(), [name]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(_tree_of(name)):
            if isinstance(node, ast.ImportFrom) and node.level:
                package = resolve_name("." * node.level + (node.module or ""), sys.modules[name].__package__)
                imported = [package, *(f"{package}.{alias.name}" for alias in node.names)]
                queue += [each for each in imported if each.startswith(BESIDE) and _is_module(each)]
    return found


def _is_module(name):
    """Return whether this is a module of ours, loaded or to be loaded, but for those that need Bridge."""
    if not name.endswith("_of_bridge"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return name in sys.modules


@cache
def _identifiers(name):
    tree = _tree_of(name)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    ]
    texts += [value for value in vars(sys.modules[name]).values() if isinstance(value, str)]
    texts += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    module = sys.modules[name]
    return {word for text in texts if text != module.__doc__ for word in re.findall(r"[A-Za-z_]\w+", text)}


@cache
def _tree_of(name):
    return ast.parse(inspect.getsource(sys.modules[name]))


def _renames(module, names):
    """Yield each rename in words, and a context in which it is made."""
    for path, home in _homes(module, names).items():
        for name in sorted(names & vars(home).keys()):
            yield f"{path}.{name}", _under_another_name(home, name)
            found = inspect.unwrap(vars(home)[name]) if callable(vars(home)[name]) else None
            if isinstance(found, FunctionType) and found.__module__.startswith(module.__name__.partition(".")[0]):
                mentioned = {*found.__code__.co_names, *found.__code__.co_varnames, *found.__code__.co_freevars}
                for other in sorted(names & mentioned):
                    yield f"{other} in {path}.{name}", edited(home, name, with_name(other, f"{other}_renamed"))


def _homes(module, names):
    """Return the module, and its classes and submodules that a patch names, by path."""
    found, queue = {}, [(module.__name__, module)]
    while queue:
        path, home = queue.pop()
        if home in found.values():
            continue
        found[path] = home
        for name in names & vars(home).keys():
            held = vars(home)[name]
            if isinstance(held, type) or (
                isinstance(held, ModuleType) and held.__name__.startswith(module.__name__)
            ):
                queue.append((f"{path}.{name}", held))
    return found


@contextlib.contextmanager
def _under_another_name(home, name):
    value = vars(home)[name]
    try:
        delattr(home, name)
    except (AttributeError, TypeError):  # of a class that cannot be changed
        yield
        return
    setattr(home, f"{name}_renamed", value)
    try:
        yield
    finally:
        delattr(home, f"{name}_renamed")
        setattr(home, name, value)


# ------------------------------------------------------------------------------------------ edits
def with_name(old, new):
    """Return an edit that gives a name in the function's code, or a parameter, another one."""

    def edit(function):
        before = ast.dump(function)
        for node in ast.walk(function):
            for field in ("id", "attr", "arg"):
                if getattr(node, field, None) == old:
                    setattr(node, field, new)
        return ast.dump(function) != before

    edit.__name__ = f"{old} is called {new}"
    return edit


def empty(function):
    function.body = [ast.Pass()]
    return True


def another_body(function):
    """Do something else altogether, with what nobody knows."""
    function.body = ast.parse(
        "return self.added_by_fork" if _parameters(function)[:1] == ["self"] else "pass"
    ).body
    return True


@contextlib.contextmanager
def edited(module, path, edit):
    """Put what the edit makes of the function at the path in its place; yields whether it changed anything."""
    owners, _, name = path.rpartition(".")
    owner = find(module, owners)
    found = inspect.getattr_static(owner, name)
    function = inspect.unwrap(found)
    made = None
    if isinstance(function, FunctionType):
        with contextlib.suppress(OSError):  # without a source
            made = _make(function, edit)
    if made is None:
        yield False
        return
    with mock.patch.object(owner, name, made):
        yield True


def _make(function, edit):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef) or not edit(definition):
        return None
    # What the function has from around it, __class__ of super() above all, are parameters of a function around it.
    outer = ", ".join(function.__code__.co_freevars)
    maker = ast.parse(f"def _make({outer}): return {definition.name}").body[0]
    maker.body.insert(0, definition)
    made: dict = {}
    code = compile(ast.fix_missing_locations(ast.Module([maker], [])), f"<edited {definition.name}>", "exec")
    exec(code, function.__globals__, made)
    return made["_make"](*(cell.cell_contents for cell in function.__closure__ or ()))


def _parameters(function):
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
