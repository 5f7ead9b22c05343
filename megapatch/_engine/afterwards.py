"""Installed targets: whether their module was loaded again, names of what others put there, and the way back."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from .._python.layers import HOLDER, MARK, attribute_of, innermost
from .holders import Holder
from .target import ReplacedTarget


def were_reloaded(installed: Collection[ReplacedTarget], gone: Collection[ReplacedTarget]) -> bool:
    """Return whether targets of a site, of which some are not in effect, were loaded again in their module."""
    functions = [target for target in gone if target.is_function]
    # A reload keeps none of the module's own functions.
    kept = [target for target in installed if target not in gone and _is_of_module(target, target.original)]
    return bool(functions) and not kept and all(map(_is_new, functions))


def _is_new(target: ReplacedTarget) -> bool:
    """Return whether the module's own code has come to the target again, as after `importlib.reload`.

    Decorators are looked through. Code that others have wrapped, with or without us, is not new. A method is new
    if its class is, whatever decorators make of it there.
    """
    if target.current is None and target.original is not None:
        return False
    parent = target.find(target.module)[0]
    if isinstance(parent, type) and parent is not target.parent:
        return (parent.__module__, parent.__qualname__) == (target.parent.__module__, target.parent.__qualname__)
    if target.inherited and target.attribute not in vars(parent):
        return False
    return innermost(target.current) is not innermost(target.original) and _is_of_module(target, target.current)


def _is_of_module(target: ReplacedTarget, function: Any) -> bool:
    """Return whether this is code of the target's module, rather than imported into it."""
    return attribute_of(innermost(function), "__globals__") is vars(target.module)


def name_of(target: ReplacedTarget, other: Any) -> str:
    """Name a function that was found at the target: by its patch, if that is another one of megapatch's."""
    if other is None:
        return "nothing"
    if holder := attribute_of(other, HOLDER):
        return str(holder)
    patch = attribute_of(other, MARK)  # functools.wraps copies ours to whatever wraps us
    if patch not in (None, getattr(target.replacement, MARK, None)):
        return f"the patch {patch}"
    name = attribute_of(other, "__qualname__") or f"an object of {type(other).__qualname__}"
    return f"{attribute_of(other, '__module__', '?')}.{name}"


def uninstall(targets: tuple[ReplacedTarget, ...], found: dict[int, list[Holder]]) -> None:
    """Put the identical originals back at the targets (see `check_current`) and where the replacements were
    imported by name since, as `holders.find` found them for a whole batch; all or none.

    Those go to `found` as holders of the object that they now have: it may be another patch's replacement.
    """
    replaced = [(target, target.replacement) for target in targets]
    with contextlib.ExitStack() as on_error:
        for target, replacement in replaced:
            if target.is_ours:
                on_error.callback(target.put_back, replacement)
                target.revert()
        for target, replacement in replaced:
            if target.after_revert is not None:  # of an added function nothing is left
                for holder in found.get(id(replacement), ()):
                    on_error.callback(holder.swap, target.after_revert, replacement)
                    if holder.swap(replacement, target.after_revert):
                        found.setdefault(id(target.after_revert), []).append(holder)
        on_error.pop_all()
