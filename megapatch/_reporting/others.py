"""Find functions of Megatron and torch.distributed that others have patched, whether megapatch does or not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from .._layers import layers_of
from .foreign import code_of, is_upstreams

PATCHED = ("megatron", "torch.distributed", "nvidia_resiliency_ext")
"""Packages that frameworks patch."""
_NOT_OTHERS = ("torch", "megapatch")  # torch wraps the functions that it compiles
_OF_PROTOCOLS = ("__subclasshook__",)  # typing_extensions sets it


def patched_by_others(loaded: Iterable[tuple[str, Any]] | None = None) -> list[tuple[str, str]]:
    """Return (module of the code that is there now, target) of each function of Megatron's and torch's, sorted.

    A target is `module:path`. Only functions and methods of modules that are loaded are looked at; nothing is run.
    """
    modules = list(sys.modules.items()) if loaded is None else list(loaded)
    found = set()
    for name, module in modules:
        if type(module) is ModuleType and any(f"{name}.".startswith(f"{package}.") for package in PATCHED):
            with contextlib.suppress(Exception):  # of a module that is being loaded
                found |= {(who, f"{name}:{path}") for path, who in _of(module)}
    return sorted(found)


def _of(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name, value in list(vars(module).items()):
        # isinstance() would ask the object for its class, and torch.distributed has one that warns of that.
        if issubclass(type(value), type) and value.__module__ == module.__name__:
            for attribute, member in list(vars(value).items()):
                if attribute not in _OF_PROTOCOLS and (who := _other(_function(member), value)):
                    yield f"{name}.{attribute}", who
        elif who := _other(value, module):
            yield name, who


def _function(member: Any) -> Any:
    """Return the function of a static method, a class method or a property."""
    return getattr(member, "__func__", None) or getattr(member, "fget", None) or member


def _other(value: Any, home: Any) -> str | None:
    if type(value) is not FunctionType:
        return None
    layers = list(layers_of(value))
    origin = sys.modules.get(code_of(layers[-1])[0])
    # A function that is imported from elsewhere may have been decorated there.
    homes = [home, origin] if origin and is_upstreams(layers[-1], home) else [home]
    for layer in layers:
        who, _ = code_of(layer)
        if who.partition(".")[0] not in _NOT_OTHERS and not any(is_upstreams(layer, place) for place in homes):
            return who if type(sys.modules.get(who)) is ModuleType else None
    return None
