"""Rebuild Ray actor classes that were made before megapatch was imported.

Ray captures a class's methods when it decorates the class: later changes have no effect in an actor, and a handle
does not know of added methods.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from .._python.loaded_modules import loaded_modules
from .._version import see

log = logging.getLogger("megapatch")

Rebuild = Callable[[ModuleType], Mapping[str, Callable[[Any], Any]]]


def actors_of(*classes: str) -> Rebuild:
    """Return a site's `rebuild` for the actor classes, in any loaded module, made of these classes or subclasses.

    An actor class that no module has at top level is out of reach; a warning names it.
    """
    return functools.partial(_actors_of, classes)


def _actors_of(classes: tuple[str, ...], module: ModuleType) -> Mapping[str, Callable[[Any], Any]]:
    bases = tuple(getattr(module, name) for name in classes)
    found: dict[type, str] = {}
    for where, actor in _actors_at_module_level():
        cls = class_of(actor)
        # Modules that imported it from its own are given the new one like any holder.
        if issubclass(cls, bases) and not found.get(cls, "").startswith(f"{cls.__module__}:"):
            found[cls] = where
    for cls in _classes_made_actors(bases):
        if cls not in found:
            _warn_out_of_reach(cls)
    return dict.fromkeys(found.values(), _rebuilt)


def class_of(actor: Any) -> type:
    """Return the class that Ray made the actor class of."""
    found: type = actor.__ray_metadata__.modified_class.__ray_actor_class__
    return found


@functools.cache  # several patches change the same class
def _warn_out_of_reach(cls: type) -> None:
    log.warning(
        "%s.%s was made a Ray actor before megapatch was imported, and is out of its reach: "
        "`import megapatch` earlier" + see("ray-actor"),
        cls.__module__,
        cls.__qualname__,
    )


def _rebuilt(actor: Any) -> Any:
    """Make an actor class again, of the same class with the same options."""
    ray, options = sys.modules["ray"], actor._default_options
    return ray.remote(**options)(class_of(actor)) if options else ray.remote(class_of(actor))


def _actors_at_module_level() -> Iterator[tuple[str, Any]]:
    kind = getattr(sys.modules.get("ray.actor"), "ActorClass", None)
    if kind is None:
        return
    for module_name, names in loaded_modules():
        for name, value in list(names.items()):
            if issubclass(type(value), kind):  # isinstance would trigger what is lazy
                yield f"{module_name}:{name}", value


def _classes_made_actors(bases: Iterable[type]) -> Iterator[type]:
    """Yield the classes that Ray has made actors of: it derives a class of its own from each."""
    for base in bases:
        cls: type
        for cls in base.__subclasses__():
            if "__ray_actor_class__" in vars(cls):
                yield base
            else:
                yield from _classes_made_actors([cls])
