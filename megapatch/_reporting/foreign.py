"""Find other code that has patched a target, before megapatch or on top of it.

Follows a function's `__wrapped__` chain. Upstream's own layers are not foreign: code of the target's distribution,
of the standard library, or of a package that the target's module imports in its source (torch.no_grad() as a
decorator). functools.wraps copies a function's name and module, so the owner of a layer is taken from the globals
of its code.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Collection, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import wrapt

from .._engine.rebuilt import RebuiltTarget
from .._engine.target import ReplacedTarget
from .._engine.watch import half_loaded
from .._python.dotted import below
from .._python.layers import attribute_of, layers_of


def patchers(
    name: str, paths: Collection[str], installed: Collection[ReplacedTarget], ours: Collection[int]
) -> list[str]:
    """Describe each patch of others at a site's targets; empty where the module is not loaded.

    Args:
        name: the site's module.
        paths: its targets there.
        installed: the targets that megapatch has installed there.
        ours: ids of all replacements by megapatch, including those of other patches.
    """
    module = sys.modules.get(name)
    if module is None or half_loaded(module):
        return []
    found = []
    known = {replaced.target: replaced for replaced in installed if not isinstance(replaced, RebuiltTarget)}
    for path in paths:
        target = f"{name}:{path}"
        replaced = known.get(target)
        with contextlib.suppress(Exception):  # whatever is there now is not ours and may do anything
            if replaced is None:
                parent, _, current = wrapt.resolve_path(*below(module, path))
                found += [f"{who} {target}" for who in _before(current, parent, ours)]
            elif replaced.is_current:
                who_before = [] if replaced.original is None else _before(replaced.original, replaced.parent, ours)
                found += [f"{who} {target} before megapatch" for who in who_before]
            else:
                found += [f"{who} {target} on top of megapatch" for who in _on_top(replaced, ours)]
    return found


def _before(function: Any, parent: Any, ours: Collection[int]) -> Iterator[str]:
    layers = list(layers_of(function))
    foreign = [layer for layer in layers if id(layer) not in ours and not is_upstreams(layer, parent)]
    for layer in foreign:
        yield f"{_who(layer)} has {'replaced' if layer is layers[-1] else 'wrapped'}"


def _on_top(target: ReplacedTarget, ours: Collection[int]) -> Iterator[str]:
    """Yield the layers above our replacement, or in place of it; upstream's own lie below it."""
    layers = list(layers_of(target.current))
    inside = next((number for number, layer in enumerate(layers) if layer is target.replacement), None)
    if inside is None and layers:
        yield f"{_who(layers[0])} has {'wrapped' if target.is_in_effect else 'replaced'}"
    for layer in layers[:inside] if inside else ():
        if id(layer) not in ours:
            yield f"{_who(layer)} has wrapped"


def is_upstreams(layer: Any, parent: Any) -> bool:
    """Return whether a layer of a function that is found in `parent`, a module or class, is not foreign."""
    module, _ = code_of(layer)
    root = module.partition(".")[0]
    home = parent.__name__ if isinstance(parent, ModuleType) else parent.__module__
    return (
        root in sys.stdlib_module_names
        or _distribution(module) in ("megapatch", _distribution(home))
        or _imports(sys.modules[home], root)
    )


def _distribution(module: str) -> str:
    """Return a name for modules that are shipped together: Megatron-Bridge shares the namespace `megatron`."""
    return "megatron.bridge" if f"{module}.".startswith("megatron.bridge.") else module.partition(".")[0]


def _imports(module: ModuleType, package: str) -> bool:
    """Return whether a module imports anything from a package, without running anything.

    Looks at the modules it holds, then at its source; anyone may have assigned its other names.
    """
    if any(
        value.__name__.partition(".")[0] == package for value in vars(module).values() if type(value) is ModuleType
    ):
        return True
    import ast  # needed only where a layer is someone else's

    source = getattr(module.__spec__ and module.__spec__.loader, "get_source", lambda name: None)(module.__name__)
    for node in ast.walk(ast.parse(source or "")):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        if package in [name.partition(".")[0] for name in names]:
            return True
    return False


def _who(layer: Any) -> str:
    module, line = code_of(layer)
    return f"{module} ({line})" if line else module


def code_of(layer: Any) -> tuple[str, str]:
    """Return the module of a layer's own code and where the code begins; for an object, its class's module."""
    layer = attribute_of(layer, "_self_wrapper", layer)  # a wrapt proxy looks like the function that it wraps
    while _is_partial(layer) or type(layer) is MethodType:
        layer = layer.func if _is_partial(layer) else layer.__func__
    if type(layer) is FunctionType:
        code = layer.__code__
        return str(layer.__globals__.get("__name__", "?")), f"{code.co_filename}:{code.co_firstlineno}"
    return type(layer).__module__, ""


def _is_partial(layer: Any) -> bool:
    return type(layer) is functools.partial
