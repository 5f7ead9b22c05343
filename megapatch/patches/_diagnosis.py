"""Helpers of diagnoses, which look at the real code without running all of it.

A path is ``"module:Class.function"``; its module is one that the target has loaded. Functions named missing_...
return what was expected and not found, in words; `lacking` makes a verdict of them.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from typing import Any

from ..patch import UNKNOWN, Verdict, unpatched


def lacking(missing: list[str]) -> Verdict:
    """Return the verdict on code that lacks something the patch relies on."""
    return Verdict(UNKNOWN, f"expected but not found: {', '.join(missing)}")


def cannot_run(what: str, error: Exception) -> Verdict:
    """Return the verdict on code that raises when a diagnosis runs it."""
    return Verdict(UNKNOWN, f"expected {what} to run on a stand-in; it raises {type(error).__name__}: {error}")


def missing_names(path: str, *names: str) -> list[str]:
    """Return the names that the function's own code mentions neither as variable or attribute nor in a text."""
    code = getattr(_resolve(path), "__code__", None)
    if code is None:
        return [path]
    texts = [constant for constant in code.co_consts if isinstance(constant, str)]
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
