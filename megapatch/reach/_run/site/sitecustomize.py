"""First on PYTHONPATH below `megapatch run`: brings megapatch in when, and only when, a target is imported.

Every Python below the command runs this as it starts, of whatever version and environment: the standard library
alone, and nothing of it that Python has not loaded by then. Imported under another name it does nothing.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs

import os
import sys
from _frozen_importlib_external import PathFinder
from _thread import get_ident

HERE = os.path.dirname(os.path.abspath(__file__))
TARGETS = "MEGAPATCH_RUN_TARGETS"


def say(text: str) -> None:
    """One line on standard error; no program fails because that is closed."""
    try:
        sys.stderr.write(f"megapatch run: {text}\n")
    except (AttributeError, OSError, ValueError):
        return


class FirstTarget:
    """Finds nothing of its own. When a target is asked for, megapatch comes first.

    It stays on sys.meta_path: a list that another thread is going through had better not shrink.
    """

    def __init__(self, targets) -> None:
        self.targets = targets
        self.path = list(sys.path)  # before Python puts the script's folder, or the working directory, in front
        self.bringing: set[int] = set()  # threads that import megapatch
        self.asking: set[int] = set()  # threads that have done that, and want to know what is found now
        self.failed = False

    def find_spec(self, name: str, path=None, target=None):
        bringing = path is None and get_ident() in self.bringing
        watched = name == "subprocess" or (name in self.targets and get_ident() not in self.asking)
        if not (bringing or watched):
            return None
        spec = self.ask_the_others(name, path, target, self.path if bringing else None)
        if spec is None and bringing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if spec is not None and spec.loader is not None and watched:
            if name == "subprocess":
                spec.loader = After(spec.loader, watch)
            else:
                spec.loader = Before(spec.loader, lambda: self.find_with_megapatch(name, path, target))
        return spec

    def find_with_megapatch(self, name: str, path, target):
        """What importlib would find had megapatch been there: importlib went through sys.meta_path, and passed by
        what megapatch has put in front since."""
        self.bring_megapatch(name)
        self.asking.add(get_ident())
        try:
            return self.ask_the_others(name, path, target)  # wrapt's finder asks this one, too
        finally:
            self.asking.discard(get_ident())

    def bring_megapatch(self, name: str) -> None:
        """Import megapatch, and all that it imports, as this interpreter could when it started: what lies in the
        working directory, or next to the script, may have any name. A second thread waits for the first."""
        if self.failed or get_ident() in self.bringing:
            return
        self.bringing.add(get_ident())
        try:
            import megapatch  # noqa: F401
        except Exception as error:
            errors = sys.modules.get("megapatch.errors")
            if errors is not None and isinstance(error, errors.StrictError):
                raise
            if not self.failed:
                self.failed = True
                if isinstance(error, ModuleNotFoundError) and error.name == "megapatch":
                    why = "megapatch is not installed there. Install it, or put its checkout on PYTHONPATH"
                else:
                    why = f"megapatch cannot be imported there ({type(error).__name__}: {error})"
                say(f"{name} is imported by {sys.executable}, and nothing is patched in this process: {why}.")
        finally:
            self.bringing.discard(get_ident())

    def ask_the_others(self, name: str, path, target, top=None):
        """What importlib would find without this finder; `top`: instead of sys.path."""
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, top if top and finder is PathFinder else path, target)
            if spec is not None:
                return spec
        return None


class Instead:
    """A module's own loader, but for what subclasses say."""

    def __init__(self, loader, do) -> None:
        self.loader, self.do = loader, do

    def __getattr__(self, name: str):
        return getattr(self.loader, name)


class Before(Instead):
    """Finds the loader anew when the module is about to be loaded.

    Not in find_spec, which importlib calls with the lock of all imports held: a thread that loads what megapatch
    needs would wait for that lock, and megapatch for the thread.
    """

    def create_module(self, spec):
        found = self.do()
        spec.loader = found.loader if found is not None else self.loader
        create = getattr(spec.loader, "create_module", None)
        return create(spec) if create else None


class After(Instead):
    """Does something with the module once it is loaded."""

    def exec_module(self, module) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.do(module)


def watch(subprocess) -> None:
    """Say once when a process is started in a way that keeps megapatch out; change nothing."""
    from contextlib import suppress  # loaded with subprocess, as is the next
    from functools import wraps

    start = subprocess.Popen.__init__
    of_process = out_of_reach().of_process
    said: list[str] = []

    @wraps(start)
    def __init__(self, *args, **options):
        if not said:
            with suppress(Exception):  # Popen says itself what is wrong with its arguments
                said.extend(of_process(args[0] if args else options["args"], options.get("env"), HERE))
            for why in said:
                say(f"process {os.getpid()} starts {why}")
        start(self, *args, **options)

    subprocess.Popen.__init__ = __init__


def out_of_reach():
    """The module megapatch.reach._run.out_of_reach, where megapatch itself need not be importable."""
    spec = PathFinder.find_spec("out_of_reach", [os.path.dirname(HERE)])
    assert spec is not None and spec.loader is not None
    module = type(sys)(spec.name)
    spec.loader.exec_module(module)
    return module


def run_the_shadowed_one() -> None:
    """The sitecustomize that would have been found without this one; its exceptions are for Python to tell."""
    ours = sys.modules.pop("sitecustomize")
    position = sys.path.index(HERE)
    sys.path[:] = [folder for folder in sys.path if folder != HERE]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours  # the import that is under way wants one
    finally:
        sys.path.insert(position, HERE)  # some programs make their children's PYTHONPATH of it


def main() -> None:
    targets = frozenset(filter(None, os.environ.get(TARGETS, "").split(",")))
    if targets:
        sys.meta_path.insert(0, FirstTarget(targets))
        if "subprocess" in sys.modules:
            watch(sys.modules["subprocess"])
        command = getattr(sys, "orig_argv", ())  # sys.argv is still to come
        if "submit" in command:
            for why in out_of_reach().of_ray_job(command, HERE):
                say(why)
    else:
        say(f"{TARGETS} is not set, though PYTHONPATH holds {HERE}: megapatch is not active in this process.")
    run_the_shadowed_one()


if __name__ == "sitecustomize":
    main()
