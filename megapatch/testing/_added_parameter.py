"""Patches as they meet a Megatron whose targets have gained a keyword that nobody knew when they were written."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..patch import Patch, Site

KEYWORD = "added_upstream"

# Attribute paths of targets whose replacement was called, and of those whose original then got the keyword.
called: set[str] = set()
reached: set[str] = set()


def with_added_parameter(patch: Patch) -> Patch:
    """Return the same patch, whose targets take one keyword more and are always called with it."""
    return Patch(patch.name, patch.doc, patch.upstream, tuple(map(_site, patch.sites)), patch.changes_numbers)


def lost() -> list[str]:
    """Return the targets whose replacement called the original without the keyword, in words."""
    return [f"{path} does not pass on a keyword that upstream may add" for path in sorted(called - reached)]


def _site(site: Site) -> Site:
    replace = {path: _factory(f"{site.module}:{path}", make) for path, make in site.replace.items()}
    return Site(site.module, site.diagnose, replace, {**site.add}, site.rebuild)


def _factory(path: str, make: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
    def make_with_parameter(original: Any) -> Callable[..., Any]:
        if not inspect.isfunction(original):
            return make(original)
        replacement = make(_accepting(path, original))

        @functools.wraps(replacement)
        def called_with_keyword(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **{KEYWORD: True, **kwargs})

        vars(called_with_keyword)["__wrapped__"] = original  # the real one, for inspect.signature()
        return called_with_keyword

    return make_with_parameter


def _accepting(path: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def accepting(*args: Any, **kwargs: Any) -> Any:
        called.add(path)
        if kwargs.pop(KEYWORD, False):
            reached.add(path)
        return original(*args, **kwargs)

    signature = inspect.signature(original)
    parameters = list(signature.parameters.values())
    added = inspect.Parameter(KEYWORD, inspect.Parameter.KEYWORD_ONLY, default=False)
    at = len(parameters) - any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    vars(accepting)["__signature__"] = signature.replace(parameters=[*parameters[:at], added, *parameters[at:]])
    return accepting
