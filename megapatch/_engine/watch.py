"""Calls back when a module has finished loading: before, during or after `import megapatch`, from any thread.

A finder of ours stands in front of all others. It finds no modules itself: it asks the others for a watched one,
and has their loader call back when the module's body has run. An import changes nothing of what is watched. So one
that fails, or is interrupted at any point, leaves the next one watched as well. More needs care:

- The module's spec has `_initializing` still set when its loader calls back, although the body has run. So that
  flag decides only where no loader has said that the body is done.
- Import hooks that are installed later stand in front, and some load the modules of a whole package themselves
  (typeguard, jaxtyping): those are loaded unseen. So our finder returns to the front when it is next asked.
- wrapt's import hooks would not do. Their finder imports a module's parent while importlib holds the global import
  lock: a thread that is importing that parent waits for the lock, and both wait for ever (wrapt 1.17 to 2.5).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

_OURS = __name__.removesuffix("_engine.watch")


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
    """In a forked child, wait for nobody's import."""
    global _forked
    _forked = True


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
    front_finder.watch(name, on_loaded)


def call_when_missed(on_missed: Callable[[], object]) -> None:
    """Call `on_missed` after an import that follows one which may have gone unseen."""
    front_finder.on_missed = on_missed


_Proxy: Any = wrapt.ObjectProxy  # not every release has its type


class _Loader(_Proxy):  # type: ignore[misc]
    """A module's loader, which also says when the module's body has run."""

    def exec_module(self, module: ModuleType) -> None:
        spec, loader = module.__spec__, self.__wrapped__
        for holder, attribute in ((module, "__loader__"), (spec, "loader")):  # so that nobody keeps this one
            if getattr(holder, attribute, None) is self:
                setattr(holder, attribute, loader)
        loader.exec_module(module)
        front_finder.note_loaded(spec.name if spec else module.__name__, module)


class _FrontFinder:
    """A finder that stays in front of all others on `sys.meta_path`, asks them, and has their loaders watched.

    Nothing is diagnosed in `find_spec`: importlib calls it with the global import lock held. A diagnosis may
    import a module that another thread is loading, and that thread may be waiting for the lock.
    """

    def __init__(self) -> None:
        self.on_missed: Callable[[], object] = lambda: None
        self.home = __file__
        self._on_loaded: dict[str, Callable[[ModuleType], None]] = {}
        self._may_have_missed = False

    def watch(self, name: str, on_loaded: Callable[[ModuleType], None]) -> None:
        """Have `on_loaded` called after each import of the module; a reload is none."""
        self._on_loaded[name] = on_loaded
        if not sys.meta_path or sys.meta_path[0] is not self:
            self._step_in_front()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if sys.meta_path[0] is not self:
            self._may_have_missed = True
            self._step_in_front()
        if not self._may_have_missed and name not in self._on_loaded:
            return None
        if name in sys.modules or _is_asking_others(name):  # a reload is no import
            return None
        spec = _ask_others(name, path, target)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            loader: Any = _Loader(spec.loader)
            spec.loader = loader
        return spec

    def note_loaded(self, name: str, module: ModuleType) -> None:
        """Call back, once the body of a module has run."""
        if on_loaded := self._on_loaded.get(name):
            on_loaded(module)
        # A look at a site imports modules of ours, with the site's lock held.
        if self._may_have_missed and not name.startswith(_OURS):
            self._may_have_missed = False
            self.on_missed()

    def _step_in_front(self) -> None:
        others = [finder for finder in sys.meta_path if finder is not self]
        sys.meta_path[:] = [self, *others]  # at once, as other threads are iterating over it


def _ask_others(name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
    """Ask the other finders, as importlib does; it would skip those that have come to stand where it has been."""
    for finder in list(sys.meta_path):
        find_spec = getattr(finder, "find_spec", None)
        if finder is front_finder or find_spec is None:
            continue
        spec: ModuleSpec | None = find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def _is_asking_others(name: str) -> bool:
    """Return whether this thread is in `_ask_others`, and one of the others asks all in turn.

    A note of it would stay where Ctrl-C comes before it is taken away.
    """
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is _ask_others.__code__ and frame.f_locals["name"] == name:
            return True
    return False


def other_copy() -> str | None:
    """Return the folder of a copy of megapatch that watches already: a vendored one, or one that `sys.modules` has
    lost."""
    for finder in sys.meta_path:
        if type(finder).__name__ == _FrontFinder.__name__ and finder is not front_finder:
            return os.path.dirname(os.path.dirname(getattr(finder, "home", "")))
    return None


front_finder = _FrontFinder()
