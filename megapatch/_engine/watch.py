"""Calls back when a module has finished loading: before, during or after `import megapatch`, from any thread.

wrapt's import hooks do the watching. Some of their habits need care:

- Registered for a module that is already in `sys.modules` a hook fires at once, even if the module's body is still
  running; and called by the module's own loader it finds `__spec__._initializing` still set although the body has
  run. So that flag decides only when no hook has said that the body is done.
- A hook is called for a module's first import only, not for one that follows `del sys.modules[name]`.
- wrapt's finder is asked for a module only if no finder in front of it has answered. Import hooks that are
  installed later stand in front, and some load the modules of a whole package themselves (typeguard, jaxtyping):
  those are loaded unseen. So a finder of ours keeps itself and wrapt's in front; it finds no modules itself.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt


def half_loaded(module: ModuleType | None) -> bool:
    """Return whether the module's body is still running, as far as its spec knows."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def loaded(name: str, wait: bool = True) -> ModuleType | None:
    """Return the module if its body has run, else None; import nothing that nobody is importing.

    Args:
        wait: whether to wait while another thread is importing it. A module that is half-loaded in our own thread
            is None either way.
    """
    wait = wait and not _forked  # the importing thread may not exist in a forked child; and everything is watched
    if wait and name not in sys.modules:
        _wait_for_importer(name)  # a thread that is looking for the file has looked for hooks before
    module = sys.modules.get(name)
    if module is not None and half_loaded(module):
        if not wait:
            return None
        _wait_for_importer(name)
        module = sys.modules.get(name)  # nothing, where the importer has failed
        if half_loaded(module):
            return None
    return module


def after_fork() -> None:
    """In a forked child, wait for nobody's import, and not for wrapt's lock either, which every import takes."""
    global _forked
    _forked = True
    # Private: wrapt 1.17 to 2.5 have it (src/wrapt/importer.py). Without it nothing is done.
    lock = getattr(sys.modules.get("wrapt.importer"), "_post_import_hooks_lock", None)
    getattr(lock, "_at_fork_reinit", lambda: None)()


_forked = False


def _wait_for_importer(name: str) -> None:
    """Wait until no other thread is importing the module; return at once if the two would wait for each other."""
    # Private: importlib itself calls it for a module that it finds half-loaded, CPython 3.3 to 3.14.
    getattr(importlib._bootstrap, "_lock_unlock_module", lambda name: None)(name)


def call_when_loaded(name: str, on_loaded: Callable[[ModuleType], None]) -> None:
    """Call `on_loaded(module)` whenever the module `name` has been imported from now on.

    For a module that is loaded already nothing is called: ask `loaded` after registering. An exception of
    `on_loaded` fails the import; the next import calls it again.
    """
    _register(name, on_loaded)
    front_finder.watch(name, on_loaded)


def call_when_missed(on_missed: Callable[[], object]) -> None:
    """Call `on_missed` after an import that follows one which may have gone unseen."""
    front_finder.on_missed = on_missed


def _register(name: str, on_loaded: Callable[[ModuleType], None]) -> None:
    registering: int | None = threading.get_ident()

    def hook(module: ModuleType) -> None:
        front_finder.registered.discard(name)
        # Fired at once, by our own registering: the module was there already, perhaps half-loaded.
        if threading.get_ident() == registering:
            return
        try:
            on_loaded(module)
        except BaseException:
            if sys.modules.get(name) is module:
                del sys.modules[name]  # as the import system is about to do: wrapt watches only absent modules
            _register(name, on_loaded)
            raise

    front_finder.registered.add(name)
    wrapt.register_post_import_hook(hook, name)
    registering = None


class _FrontFinder:
    """A finder that keeps itself and wrapt's in front of all others on `sys.meta_path`.

    Nothing is diagnosed in `find_spec`, which importlib calls with the global import lock held: a thread that
    loads a module that a diagnosis imports may be waiting for that lock.
    """

    def __init__(self) -> None:
        self.on_missed: Callable[[], object] = lambda: None
        self.home = __file__
        self.registered: set[str] = set()
        """Modules for which a hook is registered with wrapt, and has not been called."""
        self._on_loaded: dict[str, Callable[[ModuleType], None]] = {}
        self._may_have_missed = False
        self._asking: set[int] = set()  # threads

    def watch(self, name: str, on_loaded: Callable[[ModuleType], None]) -> None:
        """Register a hook whenever the module is about to be imported and none is registered for it."""
        self._on_loaded[name] = on_loaded
        if not sys.meta_path or sys.meta_path[0] is not self:
            self._step_in_front()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self._on_loaded and name not in self.registered and name not in sys.modules:
            _register(name, self._on_loaded[name])
        if sys.meta_path[0] is not self:
            self._may_have_missed = True
        if not self._may_have_missed or threading.get_ident() in self._asking:
            return None
        wrapt.register_post_import_hook(self._note_imported, name)
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

    def _note_imported(self, module: ModuleType) -> None:
        if self._may_have_missed:
            self._may_have_missed = False
            self.on_missed()


def other_copy() -> str | None:
    """Return the folder of a copy of megapatch that watches already: a vendored one, or one that `sys.modules` has
    lost."""
    for finder in sys.meta_path:
        if type(finder).__name__ == _FrontFinder.__name__ and finder is not front_finder:
            return os.path.dirname(os.path.dirname(getattr(finder, "home", "")))
    return None


def _is_wrapts(finder: Any) -> bool:
    return type(finder).__module__ == "wrapt.importer"


front_finder = _FrontFinder()
