"""Upstream's names under other names: each one that a patch looks at, one after the other.

A patch looks at the names in its own code, in texts and as attributes. They are looked for in the modules of its
sites, in what these modules hold by such names, and in the code of the functions there.
"""

import ast
import contextlib
import importlib
import inspect
import re
import sys
import warnings
from functools import cache, partial
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from unittest import mock

from megapatch.patch import ABSENT, FIXED, NEEDED
from megapatch.patches import PATCHES, _diagnosis
from megapatch.testing import run_ranks
from rigs.megatron.edits import edited, with_name

BESIDE = ("megapatch.patches.", "megapatch._mcore.")
"""Where the modules are that a patch is made of."""


def assert_renames_are_seen(family, at_least, **options):
    """Fail if a renamed name ends as "not needed", or if fewer renames than that could be tried."""
    ((tried, unseen),) = run_ranks(_unseen_renames, 1, family, **options)
    assert not unseen, "\n".join(unseen)
    assert tried >= at_least, tried


def _unseen_renames(rank, world_size, family):
    """Return how many renames were tried with a family's needed patches, and those that end as "not needed"."""
    tried, unseen = 0, []
    for patch in PATCHES:
        for site in patch.sites if patch.family == family else ():
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


def asked_for(site, module):
    """Yield renames of what a diagnosis asks for: in words, a context, and a function: is the name missing?"""
    asked, resolve = {}, _diagnosis.resolve

    def noting(path):
        caller = sys._getframe(1)
        if caller.f_code.co_name.startswith("missing_"):
            asked.update(dict.fromkeys((caller.f_code.co_name, path, name) for name in caller.f_locals["names"]))
        return resolve(path)

    with mock.patch.object(_diagnosis, "resolve", noting):
        site.diagnose(module)
    for function, path, name in asked:
        is_missing = partial(getattr(_diagnosis, function), path, name)
        home, _, attributes = path.partition(":")
        if isinstance(found := resolve(path), FunctionType):
            renamed = edited(sys.modules[home], attributes, with_name(name, f"{name}_renamed"))
            yield f"{name} in {path}", renamed, is_missing
        elif name in vars(found or site):
            yield f"{path}.{name}", _under_another_name(found, name), is_missing


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
                queue += [each for each in imported if each.startswith(BESIDE) and each in sys.modules]
    return found


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
