"""First on PYTHONPATH below `megapatch run`: imports megapatch when, and only when, a target is imported.

Every Python below the command runs this at startup, whatever its version and environment. So every Python 3 can read
it: no annotations, no f-strings. A Python that megapatch does not support does nothing here. It imports only modules
that Python has loaded by then. Imported under another name it does nothing.
"""
# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: UP

import os
import sys
from _thread import get_ident  # which threading may not have loaded yet: CPython 3.0 to 3.14

HERE = os.path.dirname(os.path.abspath(__file__))
TARGETS = "MEGAPATCH_RUN_TARGETS"


def say(text):
    """Write a message to standard error; do nothing if that is closed. Names in it may have any characters."""
    try:
        sys.stderr.write("megapatch run: %s\n" % ascii(text)[1:-1])
    except (AttributeError, OSError, ValueError):
        return


class FirstTarget(object):
    """Imports megapatch before the first target is loaded, and finds modules by asking the other finders.

    It stays on sys.meta_path, because another thread may be iterating over that list.
    """

    def __init__(self, targets):
        self.targets = targets
        self.path = list(sys.path)  # without the script's folder or the working directory, which Python adds later
        self.bringing = set()  # threads that import megapatch
        self.done = False

    def find_spec(self, name, path=None, target=None):
        if get_ident() in self.bringing:
            return None if path else self.find_at_startup(name, target)
        if self.done:
            return None
        behind = sys.meta_path[0] is not self
        if behind:  # an import hook that came later (typeguard's, jaxtyping's) may have loaded targets by itself
            sys.meta_path[:] = [self] + [finder for finder in sys.meta_path if finder is not self]
        if name not in self.targets and not (behind and self.targets.intersection(sys.modules)):
            return None
        spec = self.ask_the_others(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Before(spec.loader, lambda: self.find_with_megapatch(name, path, target))
        return spec

    def find_at_startup(self, name, target):
        """Find megapatch, or what it imports, on sys.path as it was when this interpreter started.

        Files in the working directory or next to the script may have any name, and must not be taken for them.
        """
        spec = self.ask_the_others(name, None, target, self.path)
        if spec is None:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
        return spec

    def find_with_megapatch(self, name, path, target):
        """Import megapatch, then find the module again.

        importlib is already past the finder that megapatch has just put in front of sys.meta_path.
        """
        self.bring_megapatch(name)
        return self.ask_the_others(name, path, target)

    def bring_megapatch(self, name):
        """Import megapatch for the target; a second thread waits for the first."""
        if self.done or get_ident() in self.bringing:
            return
        self.bringing.add(get_ident())
        try:
            __import__("megapatch")
        except Exception as error:
            errors = sys.modules.get("megapatch.errors")
            if errors is not None and isinstance(error, errors.StrictError):
                raise  # and again for the next target
            if not self.done:
                say(
                    "%s is imported by %s, and nothing is patched in this process: import megapatch raises %s there. "
                    "Install megapatch, or put its checkout on PYTHONPATH." % (name, sys.executable, type(error).__name__)
                )
        finally:
            self.bringing.discard(get_ident())
        self.done = True

    def ask_the_others(self, name, path, target, top=None):
        """Return the spec that importlib would find without this finder, in the folders `top` instead of sys.path."""
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            on_path = getattr(finder, "__name__", "") == "PathFinder"
            spec = finder.find_spec(name, top if top and on_path else path, target)
            if spec is not None:
                return spec
        return None


class Before(object):
    """A module's own loader, looked for again when the module is about to be loaded.

    Not in find_spec, which importlib calls with the global import lock held: a thread that loads a dependency of
    megapatch would wait for that lock, and megapatch for the thread.
    """

    def __init__(self, loader, find):
        self.loader, self.find = loader, find

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        found = self.find()
        spec.loader = found.loader if found is not None else self.loader
        create = getattr(spec.loader, "create_module", None)
        return create(spec) if create else None


def run_the_shadowed_one():
    """Import the sitecustomize that this one shadows; Python reports its exceptions."""
    ours = sys.modules.pop("sitecustomize")
    position = sys.path.index(HERE)
    sys.path[:] = [folder for folder in sys.path if folder != HERE]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":  # before 3.3 it has none
            raise
        sys.modules["sitecustomize"] = ours  # the running import of sitecustomize expects one
    finally:
        sys.path.insert(position, HERE)  # some programs build their children's PYTHONPATH from it


def main():
    targets = frozenset(filter(None, os.environ.get(TARGETS, "").split(",")))
    if not targets:
        say("%s is not set, although PYTHONPATH holds %s: megapatch is not active in this process." % (TARGETS, HERE))
    elif sys.version_info >= (3, 10):
        sys.meta_path.insert(0, FirstTarget(targets))
    run_the_shadowed_one()


if __name__ == "sitecustomize":
    main()
