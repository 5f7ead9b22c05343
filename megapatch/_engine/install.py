"""Changes a site's targets, all or none. After a fault a rollback reverts as many as it can, and raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from ..patch import Site
from . import holders
from .target import ReplacedTarget


def install(
    patch_name: str, module: ModuleType, site: Site, note: Callable[[ReplacedTarget], object] = lambda target: None
) -> tuple[ReplacedTarget, ...]:
    """Replace all targets of a site in its loaded module, or none.

    Args:
        note: called with each target before it is touched, so that the caller knows of it however this ends.

    Raises:
        Exception: whatever finding a target or a patch's factory raises; the module is then as it was.
    """
    found = [ReplacedTarget(patch_name, module, path, make) for path, make in site.replace.items()]
    if site.add:
        from .added import AddedTarget  # of few frameworks only

        found += [AddedTarget(patch_name, module, path, name) for path, name in site.add.items()]
    done: list[ReplacedTarget] = []

    def install_noted(target: ReplacedTarget) -> None:
        done.append(target)  # first: Ctrl-C may come between any two lines
        note(target)
        target.install()

    try:
        for target in found:
            install_noted(target)
        if site.rebuild:
            from .rebuilt import RebuiltTarget  # of Ray's actor classes only

            for path, make in site.rebuild(module).items():
                install_noted(RebuiltTarget(path, make))
    except BaseException:
        rollback(done)
        raise
    return tuple(done)


def rollback(targets: Iterable[ReplacedTarget]) -> None:
    """Revert these targets and the holders that were rebound; after an error continue, and raise the last one."""
    with contextlib.ExitStack() as steps:
        for target in reversed(list(targets)):  # the stack reverses the order: rebuilt targets come last
            steps.callback(_revert_holders, target, target.replacement, target.holders)
            steps.callback(target.revert)


def _revert_holders(target: ReplacedTarget, replacement: Any, places: Iterable[holders.Holder]) -> None:
    for holder in places:
        holder.swap(replacement, target.after_revert)


def rebind(targets: tuple[ReplacedTarget, ...], found: dict[int, list[holders.Holder]]) -> None:
    """Give the replacements to the holders of the originals, as `holders.find` found them for a whole batch.

    They go to `found` as holders of the replacement: another patch of the batch may have replaced that.
    """
    for target in targets:
        if not target.inherited:  # a holder of the parent class's function means that one
            for holder in found.get(id(target.original), ()):
                before, target.holders = target.holders, (*target.holders, holder)
                if holder.swap(target.original, target.replacement):
                    found.setdefault(id(target.replacement), []).append(holder)
                else:
                    target.holders = before


def find_holders(held: list[tuple[ReplacedTarget, Any]]) -> dict[int, list[holders.Holder]]:
    """Find the holders of these objects, each of which is, or was, at a target."""
    return holders.find([each for _, each in held], [(target.parent, target.attribute) for target, _ in held])
