"""Calls back when a module has finished loading: before, during or after `import megapatch`, from any thread.

wrapt's import hooks do the watching. Two of their habits need care: registered for a module that is already
in `sys.modules` a hook fires at once, even if the module's body is still running; and called by the module's
own loader it finds `__spec__._initializing` still set although the body has run. So that flag decides only
when no hook has said that the body is done.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import wrapt

from .lookout import lookout


def half_loaded(module: ModuleType | None) -> bool:
    """Whether the module's body is still running, as far as its spec knows."""
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
    # Private: what importlib itself calls for a module that it finds half-loaded, CPython 3.3 to 3.14.
    getattr(importlib._bootstrap, "_lock_unlock_module", lambda name: None)(name)


def watch(name: str, on_loaded: Callable[[ModuleType], None]) -> None:
    """Call `on_loaded(module)` whenever the module `name` has been imported from now on.

    For a module that is loaded already nothing is called: ask `loaded` after registering. An exception of
    `on_loaded` fails the import; the next import calls it again.
    """
    _register(name, on_loaded)
    lookout.watch(name, functools.partial(_register, name, on_loaded))


def _register(name: str, on_loaded: Callable[[ModuleType], None]) -> None:
    registering: int | None = threading.get_ident()

    def hook(module: ModuleType) -> None:
        lookout.registered.discard(name)
        # Fired at once, by our own registering: the module was there already, perhaps half-loaded.
        if threading.get_ident() == registering:
            return
        try:
            on_loaded(module)
        except BaseException:
            if sys.modules.get(name) is module:
                del sys.modules[name]  # as the import system is about to do: wrapt watches what is not there
            _register(name, on_loaded)
            raise

    lookout.registered.add(name)
    wrapt.register_post_import_hook(hook, name)
    registering = None
