"""Helpers of diagnoses, which look at the real code without running all of it.

A path is ``"module:Class.function"``; its module is one that the target has loaded. Functions named missing_...
return what was expected and not found, in words; `lacking` makes a verdict of them.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..patch import UNKNOWN, Verdict, unpatched

ASSERTIONS = (AssertionError, RuntimeError, ValueError)
"""What an assertion raises, and what it raises where a fork has made an ordinary error of it."""


class AnswersNone:
    """An object of which every attribute that nobody knows here is None: forks read some of their own.

    Not something that can be called or looked into: code which needs that is not the code that a patch knows.
    """

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class StandIn(AnswersNone, SimpleNamespace):
    """Just enough of an object for the code that a diagnosis runs."""


def answering_none(kind: Any) -> Any:
    """Return a subclass of one of upstream's classes, with None for the attributes that nobody knows here."""
    return type(kind)(kind.__name__, (kind, AnswersNone), {"__module__": kind.__module__})


def real_imports_but(package: str, instead: Callable[[], Any]) -> Callable[..., Any]:
    """Return an `__import__` for upstream code: `instead()` for its own package; what a fork imports is real."""

    def import_module(name: str, namespace: Any = None, scope: Any = None, names: Any = (), level: int = 0) -> Any:
        if level or name.partition(".")[0] == package:
            return instead()
        return builtins.__import__(name, namespace, scope, names, level)

    return import_module


def lacking(missing: list[str]) -> Verdict:
    """Return the verdict on code that lacks something the patch relies on."""
    return Verdict(UNKNOWN, f"expected but not found: {', '.join(missing)}")


def cannot_run(what: str, error: Exception) -> Verdict:
    """Return the verdict on code that raises when a diagnosis runs it."""
    return Verdict(UNKNOWN, f"expected {what} to run on a stand-in; it raises {type(error).__name__}: {error}")


def missing_names(path: str, *names: str) -> list[str]:
    """Return the names that the function's own code mentions neither as variable or attribute nor in a text."""
    function = _resolve(path)
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


def _in_words(name: str) -> str:
    return name if name.isidentifier() else f'the text "{name}"'


def asserted(*texts: str) -> tuple[str, ...]:
    """Return texts of assertions that a diagnosis looks for: none under -O, which removes assertions."""
    return texts if __debug__ else ()


def missing_parameters(path: str, *names: str) -> list[str]:
    """Return the parameters that the function does not take."""
    function = _resolve(path)
    if not inspect.isfunction(function):
        return [path]
    parameters = inspect.signature(function).parameters
    return [f"parameter {name} of {path}" for name in names if name not in parameters]


def missing_attributes(path: str, *names: str) -> list[str]:
    """Return the attributes that the object (``"module:"`` for a module) does not have."""
    found = _resolve(path)
    return [f"{path.rstrip(':')}.{name}" for name in names if not hasattr(found, name)]


def reads_in_order(function: Any, *names: str) -> list[str]:
    """Return those of the attributes that the function's own code reads, in the order of the code."""
    return [
        instruction.argval
        for instruction in dis.get_instructions(unpatched(function))
        if instruction.argval in names
    ]


def _resolve(path: str) -> Any:
    module, _, attributes = path.partition(":")
    try:
        found = functools.reduce(getattr, filter(None, attributes.split(".")), sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return unpatched(found)
