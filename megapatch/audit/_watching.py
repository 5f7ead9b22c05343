"""Sites whose replacements look on and change nothing: before a call, after it, or around it.

A look gets the call's own arguments. It is a method with `observes`, or it cannot fail.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

from .._python.dotted import find
from ..patch import ABSENT, NEEDED, UNKNOWN, Site, Verdict

Watcher: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes the original function, and returns the one that is installed."""

RAISED = object()
"""What a call has returned that has raised."""


def before(look: Callable[..., object]) -> Watcher:
    """Watch a function: look(...) sees the arguments of each call as it begins."""

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def patched_function(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return function(*args, **kwargs)

        return patched_function

    return watch


def after(look: Callable[..., object]) -> Watcher:
    """Watch a function: look(result, ...) sees each call that has returned."""

    def end(_: None, result: Any, /, *args: Any, **kwargs: Any) -> None:
        if result is not RAISED:
            look(result, *args, **kwargs)

    return around(lambda *_, **__: None, end)


def around(begin: Callable[..., Any], end: Callable[..., object]) -> Watcher:
    """Watch a function, plain or a coroutine function, from begin(...) to end(begun, result, ...) of each call.

    Args:
        end: called with what `begin` has returned, and the result, or `RAISED`.
    """

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def patched_function(*args: Any, **kwargs: Any) -> Any:
            begun, result = begin(*args, **kwargs), RAISED
            try:
                result = function(*args, **kwargs)
            finally:
                end(begun, result, *args, **kwargs)
            return result

        @functools.wraps(function)
        async def patched_coroutine(*args: Any, **kwargs: Any) -> Any:
            begun, result = begin(*args, **kwargs), RAISED
            try:
                result = await function(*args, **kwargs)
            finally:
                end(begun, result, *args, **kwargs)
            return result

        return patched_coroutine if inspect.iscoroutinefunction(inspect.unwrap(function)) else patched_function

    return watch


def site(
    module: str,
    replace: Mapping[str, Watcher],
    *,
    expected: Mapping[str, tuple[str, ...]] | None = None,
    optional: str | None = None,
) -> Site:
    """Return a site that is watched if it has all of these functions, with the parameters that the audit reads.

    Args:
        replace: as in Site.
        expected: by path of a function, the parameters that the audit reads.
        optional: the releases that have the module and lack the first of these functions, so that there is
            nothing to watch; None where no release lacks it.
    """
    return Site(
        module=module,
        diagnose=functools.partial(_diagnose, tuple(replace), expected or {}, optional is not None),
        replace=replace,
    )


def _diagnose(
    paths: tuple[str, ...], expected: Mapping[str, tuple[str, ...]], is_optional: bool, module: ModuleType
) -> Verdict:
    if is_optional and find(module, paths[0]) is None:
        return Verdict(ABSENT, f"this version has no {paths[0]}")
    missing = [path for path in paths if not callable(find(module, path))]
    for path, parameters in expected.items():
        known = inspect.signature(inspect.unwrap(find(module, path))).parameters if path not in missing else ()
        missing += [f"{path}({name})" for name in parameters if name not in known]
    if missing:
        return Verdict(UNKNOWN, f"expected {', '.join(missing)}")
    return Verdict(NEEDED, "watched")
