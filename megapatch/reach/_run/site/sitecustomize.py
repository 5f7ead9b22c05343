"""First on PYTHONPATH below `megapatch run`: imports megapatch when, and only when, a target is imported.

Every Python below the command runs this at startup, whatever its version and environment. So it uses only those
modules of the standard library that Python has loaded by then. Imported under another name it does nothing.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs

import os
import sys

# importlib.machinery and threading may not be loaded yet. They take PathFinder and get_ident from these modules in
# CPython 3.6 to 3.13: see Lib/importlib/machinery.py and Lib/threading.py.
from _frozen_importlib_external import PathFinder
from _thread import get_ident

HERE = os.path.dirname(os.path.abspath(__file__))
TARGETS = "MEGAPATCH_RUN_TARGETS"

loaded = {}  # type: ignore[var-annotated]  # by name, what `load` has loaded


def say(text: str) -> None:
    """Write a message to standard error, without secrets and control characters; do nothing if that is closed."""
    try:
        text = load("_printable", 3).first_line_at_the_margin(text)
    except Exception:  # of a Python that is older than what megapatch needs
        text = ascii(text)
    try:
        sys.stderr.write(f"megapatch run: {text}\n")
    except (AttributeError, OSError, ValueError):
        return


def load(name: str, folders_up: int):
    """Load a file of megapatch that needs only the standard library; megapatch itself may not be importable.

    The standard library is first on sys.path meanwhile: files next to the script may have any name.
    """
    if name in loaded:
        return loaded[name]
    folder = HERE
    for _ in range(folders_up):
        folder = os.path.dirname(folder)
    spec = PathFinder.find_spec(name, [folder])
    assert spec is not None and spec.loader is not None
    module = type(sys)(spec.name)
    library = os.path.dirname(os.__file__)
    sys.path.insert(0, library)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(library)  # the first one, which is ours
    return loaded.setdefault(name, module)


class FirstTarget:
    """Imports megapatch before the first target is loaded, and finds modules by asking the other finders.

    It stays on sys.meta_path, because another thread may be iterating over that list.
    """

    def __init__(self, targets) -> None:
        self.targets = targets
        self.path = list(sys.path)  # without the script's folder or the working directory, which Python adds later
        self.bringing: set[int] = set()  # threads that import megapatch
        self.asking: set[int] = set()  # threads that have imported it and look for the target again
        self.failed = False
        self.may_have_missed = False

    def find_spec(self, name: str, path=None, target=None):
        bringing = path is None and get_ident() in self.bringing
        asked_again = get_ident() in self.asking
        watched = name == "subprocess" or (name in self.targets and not asked_again)
        if "megapatch" not in sys.modules and sys.meta_path[0] is not self:
            # An import hook that came later (typeguard's, jaxtyping's) may have loaded targets by itself.
            sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if finder is not self)]
            self.may_have_missed = True
        if not (bringing or watched or (self.may_have_missed and not asked_again)):
            return None
        spec = self.ask_the_others(name, path, target, self.path if bringing else None)
        if spec is None and bringing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if spec is not None and spec.loader is not None and watched:
            if name == "subprocess":
                spec.loader = After(spec.loader, watch)
            else:
                spec.loader = Before(spec.loader, lambda: self.find_with_megapatch(name, path, target))
        elif spec is not None and spec.loader is not None and self.may_have_missed and not bringing:
            spec.loader = After(spec.loader, lambda module: self.look_for_missed(name))
        return spec

    def look_for_missed(self, name: str) -> None:
        """Import megapatch if a target is loaded already; it patches those that are."""
        if self.may_have_missed:
            self.may_have_missed = False
            if not self.targets.isdisjoint(sys.modules):
                self.bring_megapatch(name)

    def find_with_megapatch(self, name: str, path, target):
        """Import megapatch, then find the module again.

        importlib is already past the finder that megapatch has just put in front of sys.meta_path.
        """
        self.bring_megapatch(name)
        self.asking.add(get_ident())
        try:
            # wrapt's ImportHookFinder calls find_spec, which asks this one, too.
            return self.ask_the_others(name, path, target)
        finally:
            self.asking.discard(get_ident())

    def bring_megapatch(self, name: str) -> None:
        """Import megapatch and its dependencies from sys.path as it was when this interpreter started.

        Files in the working directory or next to the script may have any name, and must not be taken for them. A
        second thread waits for the first.
        """
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
        """Return the spec that importlib would find without this finder, in the folders `top` instead of sys.path."""
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, top if top and finder is PathFinder else path, target)
            if spec is not None:
                return spec
        return None


class Instead:
    """A module's own loader, except for the methods of a subclass."""

    def __init__(self, loader, do) -> None:
        self.loader, self.do = loader, do

    def __getattr__(self, name: str):
        return getattr(self.loader, name)


class Before(Instead):
    """Looks for the loader again when the module is about to be loaded.

    Not in find_spec, which importlib calls with the global import lock held: a thread that loads a dependency of
    megapatch would wait for that lock, and megapatch for the thread.
    """

    def create_module(self, spec):
        found = self.do()
        spec.loader = found.loader if found is not None else self.loader
        create = getattr(spec.loader, "create_module", None)
        return create(spec) if create else None


class After(Instead):
    """Calls a function with the module once it is loaded."""

    def exec_module(self, module) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.do(module)


said: list[str] = []  # what this process has said of processes that it starts; once is enough


def look_at(command, environment) -> None:
    """Say once that a process is started in a way that keeps megapatch out."""
    if said:
        return
    try:
        said.extend(load("out_of_reach", 1).of_process(command, environment, HERE))
    except Exception:  # of wrong arguments, which whoever starts the process reports
        return
    for why in said:
        say(f"process {os.getpid()} starts {why}")


def watch(subprocess) -> None:
    """Look at the processes that subprocess.Popen starts; change nothing."""
    from functools import wraps  # loaded with subprocess

    start = subprocess.Popen.__init__

    @wraps(start)
    def __init__(self, *args, **options):
        look_at(args[0] if args else options.get("args"), options.get("env"))
        start(self, *args, **options)

    subprocess.Popen.__init__ = __init__


# An audit hook would see these as well. But Python would call it for each id(), too, which would take
# eight times as long, and copy.deepcopy() twice.
STARTING = {  # the positions of command and environment; the other functions of os end in one of these
    "system": (0, None),
    "execv": (1, None),
    "execve": (1, 2),
    "posix_spawn": (1, 2),
    "posix_spawnp": (1, 2),
}


def watch_os() -> None:
    """Look at the processes that the functions of os start; change nothing."""
    for name, (command, environment) in STARTING.items():
        function = getattr(os, name, None)
        if function is not None:
            setattr(os, name, watched(function, command, environment))
            if function in os.supports_fd:
                os.supports_fd.add(getattr(os, name))


def watched(function, command: int, environment):
    """Return a function that does the same, after a look at the process that it starts."""

    def starting(*args, **options):
        values = (*args, *options.values())
        env = values[environment] if environment is not None and len(values) > environment else None
        look_at(values[command] if len(values) > command else None, env)
        return function(*args, **options)

    for attribute in ("__name__", "__qualname__", "__doc__", "__text_signature__"):
        setattr(starting, attribute, getattr(function, attribute, None))
    starting.__module__ = "os"  # where pickle finds it
    starting.__wrapped__ = function  # type: ignore[attr-defined]
    return starting


def run_the_shadowed_one() -> None:
    """Import the sitecustomize that this one shadows; Python reports its exceptions."""
    ours = sys.modules.pop("sitecustomize")
    position = sys.path.index(HERE)
    sys.path[:] = [folder for folder in sys.path if folder != HERE]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours  # the running import of sitecustomize expects one
    finally:
        sys.path.insert(position, HERE)  # some programs build their children's PYTHONPATH from it


def main() -> None:
    targets = frozenset(filter(None, os.environ.get(TARGETS, "").split(",")))
    if targets:
        sys.meta_path.insert(0, FirstTarget(targets))
        watch_os()
        if "subprocess" in sys.modules:
            watch(sys.modules["subprocess"])
        command = getattr(sys, "orig_argv", ())  # sys.argv is not set yet
        if "submit" in command:
            for why in load("out_of_reach", 1).of_ray_job(command, HERE):
                say(why)
    else:
        say(f"{TARGETS} is not set, although PYTHONPATH holds {HERE}: megapatch is not active in this process.")
    run_the_shadowed_one()


if __name__ == "sitecustomize":
    main()
