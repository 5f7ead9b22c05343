"""Stands first on sys.meta_path, to notice what wrapt's import hooks miss. It finds no modules itself.

wrapt's finder is asked for a module only if no finder in front of it has answered. Import hooks that are installed
later stand in front, and some load the modules of a whole package themselves (typeguard, jaxtyping): those are
loaded unseen. And a hook is called for a module's first import only, not for one that follows
`del sys.modules[name]`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt


class Lookout:
    """A finder that keeps itself and wrapt's in front of all others.

    Nothing is diagnosed in `find_spec`, which importlib calls with the global import lock held: a thread that
    loads what a diagnosis imports may be waiting for that lock.
    """

    def __init__(self) -> None:
        self._register_again: dict[str, Callable[[], object]] = {}
        self._on_missed: Callable[[], object] = lambda: None
        self._may_have_missed = False
        self._asking: set[int] = set()  # threads
        self.registered: set[str] = set()
        """Modules for which a hook is registered with wrapt, and has not been called."""

    def watch(self, name: str, register: Callable[[], object]) -> None:
        """Call `register` whenever the module is about to be imported and no hook is registered for it."""
        self._register_again[name] = register
        if not sys.meta_path or sys.meta_path[0] is not self:
            self._step_in_front()

    def call_when_missed(self, on_missed: Callable[[], object]) -> None:
        """Call `on_missed` after an import that follows one which may have gone unseen."""
        self._on_missed = on_missed

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self._register_again and name not in self.registered and name not in sys.modules:
            self._register_again[name]()
        if sys.meta_path[0] is not self:
            self._may_have_missed = True
        if not self._may_have_missed or threading.get_ident() in self._asking:
            return None
        wrapt.register_post_import_hook(self._look_again, name)
        return self._ask_in_new_order(name, path, target)

    def _ask_in_new_order(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        """Step in front, and ask the others: importlib would skip those that come to stand where it has been."""
        self._step_in_front()
        self._asking.add(threading.get_ident())
        try:
            for finder in sys.meta_path[1:]:
                find_spec = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find_spec(name, path, target) if find_spec else None
                if spec is not None:
                    return spec
        finally:
            self._asking.discard(threading.get_ident())
        return None

    def _step_in_front(self) -> None:
        wrapts = [finder for finder in sys.meta_path if _is_wrapts(finder)]
        others = [finder for finder in sys.meta_path if finder is not self and not _is_wrapts(finder)]
        sys.meta_path[:] = [self, *wrapts, *others]  # at once, as other threads are iterating over it

    def _look_again(self, module: ModuleType) -> None:
        if self._may_have_missed:
            self._may_have_missed = False
            self._on_missed()


def _is_wrapts(finder: Any) -> bool:
    return type(finder).__module__ == "wrapt.importer"


lookout = Lookout()
