"""Helpers of diagnoses, which look at the real code without running all of it.

A path is ``"module:Class.function"``; its module is one that the target has loaded. A diagnosis lists what is
`unmet`, and `expect_none` refuses code with any of it.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from .._python.dotted import find
from .._python.layers import innermost
from ..patch import ABSENT, FIXED, NEEDED, UNKNOWN, NotAsExpected, Verdict, unpatched

ASSERTIONS = (AssertionError, RuntimeError, ValueError)
"""The error of an assertion, and those that a fork may raise in its place."""


class AnswersNone:
    """An object of which every attribute that nobody knows here is None: forks read some of their own.

    It cannot be called or looked into: code that needs more is not the code that a patch knows.
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class StandIn(AnswersNone, SimpleNamespace):
    """Just enough of an object for the code that a diagnosis runs."""


class Idle:
    """An object, a class or a function that does nothing, and has only what does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def torch_stand_in(**names: Any) -> StandIn:
    """Return a torch of these names, and of the real profiler, by which forks time code."""
    return StandIn(profiler=sys.modules["torch"].profiler, **names)


def answering_none(kind: Any) -> Any:
    """Return a subclass of one of upstream's classes, with None for the attributes that nobody knows here."""
    return type(kind)(kind.__name__, (AnswersNone, kind), {"__module__": kind.__module__})


def real_imports_but(package: str, instead: Callable[[], Any]) -> Callable[..., Any]:
    """Return an `__import__` for upstream code: `instead()` for its own package, the real import for others."""

    def import_module(name: str, namespace: Any = None, scope: Any = None, names: Any = (), level: int = 0) -> Any:
        if level or name.partition(".")[0] == package:
            return instead()
        return builtins.__import__(name, namespace, scope, names, level)

    return import_module


def with_globals(function: Any, **stand_ins: Any) -> FunctionType:
    """Copy a function, without decorators, with stand-ins for some of its globals. Its module is unchanged."""
    function = inspect.unwrap(unpatched(function))
    namespace = {**function.__globals__, **stand_ins}
    copy = FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def expect_none(*missing: str) -> None:
    """Refuse code that lacks something the patch relies on."""
    if missing:
        raise NotAsExpected(f"expected but not found: {', '.join(missing)}")


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """Refuse code that raises when a diagnosis runs it here."""
    try:
        yield
    except Exception as error:
        found = NotAsExpected(f"expected {what} to run on a stand-in; it raises {type(error).__name__}: {error}")
        if not __debug__:
            found = NotAsExpected(
                f"expected {what} to run on a stand-in with assertions; python -O turns them off"
            )
        raise found from error


_READS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "IMPORT_FROM"}

Lacking = Callable[[ModuleType], str]
"""Says of a loaded module why its release lacks a name, in words; "" where the name should be there."""


def gone(name: str, module: ModuleType, lacking_there: Lacking | None = None) -> Verdict:
    """Return the verdict on a name that is not there: ABSENT only if this release is known to lack it."""
    why = lacking_there(module) if lacking_there else ""
    if not why:
        expect_none(f"{module.__name__}:{name}")
    return Verdict(ABSENT, f"this version has no {name}: {why}")


def before_release(distribution: str, release: str) -> Lacking:
    """Return a `Lacking` for a name that came with a release; "" where the version is not known.

    A version decides only about a name that is gone. Development versions count as the release that they lead to.
    """

    return functools.partial(_came_with, distribution, release)


def _came_with(distribution: str, release: str, module: ModuleType) -> str:
    from .._versions import is_before  # only where a name is gone

    # megatron is a namespace package of several distributions.
    older = is_before(release, distribution, module.__name__.partition(".")[0])
    return f"it came with {distribution} {release}" if older else ""


def most_urgent(*found: Verdict) -> Verdict:
    """Return the verdict that most needs attention, of parts of one site."""
    return min(found, key=lambda verdict: (UNKNOWN, NEEDED, FIXED).index(verdict.kind))


class unmet:
    """Each function returns the expectations of upstream's code that it does not meet, in words."""

    @staticmethod
    def names(path: str, *names: str) -> list[str]:
        """Return the names that the function's own code has neither as variable or attribute nor in a text."""
        function = resolve(path)
        code = getattr(function, "__code__", None)
        if code is None:
            return [path]
        documentation = getattr(function, "__doc__", None)  # it may tell of what is no longer there
        texts = [text for text in code.co_consts if isinstance(text, str) and text != documentation]
        mentioned = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
        return [
            f"{_in_words(name)} in {path}"
            for name in names
            if name not in mentioned and not any(name in text for text in texts)
        ]

    @staticmethod
    def parameters(path: str, *names: str) -> list[str]:
        """Return the parameters that the function does not take."""
        function = resolve(path)
        if not inspect.isfunction(function):
            return [path]
        parameters = inspect.signature(function).parameters
        return [f"parameter {name} of {path}" for name in names if name not in parameters]

    @staticmethod
    def attributes(path: str, *names: str) -> list[str]:
        """Return the attributes that the object (``"module:"`` for a module) does not have."""
        found = resolve(path)
        return [f"{path.rstrip(':')}.{name}" for name in names if not hasattr(found, name)]

    @staticmethod
    def reads(path: str, *names: str) -> list[str]:
        """Return the names that the function's code reads neither by `reads_in_order` nor by getattr()."""
        function = resolve(path)
        texts = (text for code in codes_of(function) for text in code.co_consts)
        found = {*reads_in_order(function, *names), *texts}
        return [f"{name} in {path}" for name in names if name not in found]


def _in_words(name: str) -> str:
    return name if name.isidentifier() else f'the text "{name}"'


def reads_in_order(function: Any, *names: str) -> list[str]:
    """Return those of the attributes and global names that the function's code reads, in the order of the code.

    Looks behind decorators, those too that keep the function in a closure, and into functions that it defines.
    """
    return [name for code in codes_of(function) for name in _read_by(code) if name in names]


def in_finally(function: Any, *names: str, branches: int = 1) -> bool:
    """Return whether the function reads one of the names in a `finally`, where it is called in this many branches.

    Its code has a `finally` twice: for the way with an exception, and for the way without.
    """
    return len(reads_in_order(function, *names)) > branches


def codes_of(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function, and of those behind its decorators. Nothing for any other object."""
    if isinstance(function, (staticmethod, classmethod, MethodType)):
        function = function.__func__
    function = innermost(unpatched(function)) if callable(function) else function
    if isinstance(function, FunctionType):
        yield function.__code__
        for cell in function.__closure__ or ():
            if isinstance(cell.cell_contents, FunctionType):
                yield from codes_of(cell.cell_contents)


def _read_by(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, CodeType):
            yield from _read_by(instruction.argval)
        elif instruction.opname in _READS:
            yield instruction.argval


def resolve(path: str) -> Any:
    """Return the object at a path, without our replacement; None where there is none."""
    module, _, attributes = path.partition(":")
    return unpatched(find(sys.modules.get(module), attributes))
