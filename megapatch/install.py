"""Changes a site's targets all or none, rebinds other holders of the old function, and undoes both.

What is installed is an ordinary function, never a wrapt proxy: torch.compile silently drops a proxy's body,
and a proxy cannot be pickled or deep-copied.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any

import wrapt

from .patch import MARK, MegapatchError, Site


class RestoreError(MegapatchError):
    """A target could not be put back because someone has patched on top of megapatch."""


@dataclass(frozen=True)
class Installed:
    """One target that has been replaced.

    target: ``"module:Class.attribute"``. rebound: other names, as ``"module:name"``, that held the original.
    """

    target: str
    module: ModuleType
    parent: Any
    attribute: str
    original: Any
    replacement: FunctionType
    inherited: bool
    rebound: tuple[str, ...] = ()

    @property
    def current(self) -> Any:
        """What the module has at the target's path now (after a reload, in the new class); None for nothing."""
        try:
            return wrapt.resolve_path(self.module, self.target.partition(":")[2])[2]
        except AttributeError:
            return None

    @property
    def is_in_place(self) -> bool:
        return self.current is self.replacement

    @property
    def was_reloaded(self) -> bool:
        """Whether the module's own code is back at the target, as after `importlib.reload`."""
        return getattr(self.current, "__globals__", None) is vars(self.module)

    def overwritten_by(self) -> str:
        """Who stands at the target instead of us, in words."""
        other = self.current
        if other is None:
            return "nothing"
        return f"{getattr(other, '__module__', '?')}.{getattr(other, '__qualname__', repr(other))}"


def install(patch_name: str, module: ModuleType, site: Site) -> tuple[Installed, ...]:
    """Replace all targets of a site in its loaded module, or none.

    Raises whatever finding a target or a patch's factory raises; the module is then as it was.
    """
    found = [_prepare(patch_name, module, path, factory) for path, factory in site.replace.items()]
    done: list[Installed] = []
    try:
        for one in found:
            setattr(one.parent, one.attribute, one.replacement)
            done.append(one)
    except BaseException:
        for one in reversed(done):
            _put_back(one)
        raise
    rebound = rebind({id(one.original): one.replacement for one in done if isinstance(one.parent, ModuleType)})
    return tuple(replace(one, rebound=tuple(rebound.get(id(one.original), ()))) for one in done)


def uninstall(installed: tuple[Installed, ...]) -> None:
    """Put back the identical originals, also where the replacement was since imported by name.

    Raises RestoreError, before anything is changed, when a target is no longer ours.
    """
    check_in_place(installed)
    for one in reversed(installed):
        _put_back(one)
    rebind({id(one.replacement): one.original for one in installed if isinstance(one.parent, ModuleType)})


def check_in_place(installed: tuple[Installed, ...]) -> None:
    """Raise RestoreError, naming who, when a target has been replaced by someone else."""
    for one in installed:
        if not one.is_in_place:
            raise RestoreError(
                f"{one.target} cannot be restored: {one.overwritten_by()} was installed over megapatch's "
                "replacement; undo that first"
            )


def rebind(replacements: Mapping[int, Any]) -> dict[int, list[str]]:
    """Rebind every module-level name that holds one of the objects (by identity), in one sweep.

    Reads modules' dictionaries only, so that a lazy attribute is never triggered. Returns what was rebound:
    object id to names such as ``"user_script:train"``.
    """
    rebound: dict[int, list[str]] = {}
    if not replacements:
        return rebound
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])
                rebound.setdefault(id(value), []).append(f"{module_name}:{name}")
    return rebound


def _prepare(patch_name: str, module: ModuleType, path: str, factory: Any) -> Installed:
    parent, attribute, original = wrapt.resolve_path(module, path)
    replacement = factory(original)
    if type(replacement) is not FunctionType:
        raise TypeError(
            f"the replacement for {module.__name__}:{path} is a {type(replacement).__name__}, not a plain function"
        )
    setattr(replacement, MARK, patch_name)
    return Installed(
        target=f"{module.__name__}:{path}",
        module=module,
        parent=parent,
        attribute=attribute,
        original=original,
        replacement=replacement,
        inherited=attribute not in vars(parent),
    )


def _put_back(one: Installed) -> None:
    if one.inherited:
        delattr(one.parent, one.attribute)
    else:
        setattr(one.parent, one.attribute, one.original)
