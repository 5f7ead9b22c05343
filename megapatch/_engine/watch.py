"""Tells when a module has finished loading: before, during or after `import megapatch`, from any thread.

wrapt's import hooks do the watching. Two of their habits need care: registered for a module that is already
in `sys.modules` a hook fires at once, even if the module's body is still running; and called by the module's
own loader it finds `__spec__._initializing` still set although the body has run. So that flag decides only
when nobody told us that the body is done.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import wrapt


def half_loaded(module: ModuleType | None) -> bool:
    """Whether the module's body is (as far as its spec tells) still running."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def loaded(name: str, wait: bool = True) -> ModuleType | None:
    """The module if its body has run, else None; imports nothing that nobody is importing.

    When another thread is importing it, waits until that is done, unless told not to. Half-loaded in our own
    thread it is None.
    """
    wait = wait and not _forked  # it may be a thread that is not here; and all is watched
    if wait and name not in sys.modules:
        _wait_for_importer(name)  # who is looking for the file has looked for hooks before, perhaps for none
    module = sys.modules.get(name)
    if module is not None and half_loaded(module):
        if not wait:
            return None
        try:
            module = importlib.import_module(name)  # takes the module's lock, and so waits for its importer
        except Exception:
            return None  # the importer has failed, and says so itself
        if half_loaded(module):
            return None
    return module


def after_fork() -> None:
    """In a forked child: wait for nobody's import, and not for wrapt's lock either, which every import takes."""
    global _forked
    _forked = True
    # Private, as is the function below: each may be gone one day.
    lock = getattr(sys.modules.get("wrapt.importer"), "_post_import_hooks_lock", None)
    getattr(lock, "_at_fork_reinit", lambda: None)()


_forked = False


def _wait_for_importer(name: str) -> None:
    """Until no other thread is importing the module; where the two would wait for each other, return at once."""
    getattr(importlib._bootstrap, "_lock_unlock_module", lambda name: None)(name)


def watch(name: str, on_loaded: Callable[[ModuleType], None]) -> None:
    """Call `on_loaded(module)` once the module `name` has been imported, if that is still to come.

    For a module that is there already nothing is called: look with `loaded` after registering. What `on_loaded`
    raises fails the import; the next one calls it again.
    """
    registering: int | None = threading.get_ident()

    def hook(module: ModuleType) -> None:
        # Fired at once, by our own registering: the module was there already, perhaps half-loaded.
        if threading.get_ident() == registering:
            return
        try:
            on_loaded(module)
        except BaseException:
            if sys.modules.get(name) is module:
                del sys.modules[name]  # as the import system is about to do: wrapt watches what is not there
            watch(name, on_loaded)
            raise

    wrapt.register_post_import_hook(hook, name)
    registering = None
