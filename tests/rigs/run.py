"""A project whose targets a third party patches, and processes started with and below `megapatch run`."""

import os
import subprocess
import sys

from megapatch.reach._run import reaching

PATCH = """
import functools
from megapatch import NEEDED, Patch, Site, Verdict

def louder(greet):
    @functools.wraps(greet)
    def replacement(name):
        return greet(name) + "!"
    return replacement

def patch(module):
    site = Site(module, lambda module: Verdict(NEEDED, "too quiet"), replace={"greet": louder})
    return Patch("acme." + module, "Greetings are loud.", upstream="", sites=(site,))

ONE, TWO = patch("greeter"), patch("greeter2")
"""
GREETER = "def greet(name): return 'hello ' + name\n"
PROGRAM = "import greeter; print(greeter.greet('you'))\n"
CHILDREN = """
import multiprocessing, subprocess, sys

def greet(channel):
    import greeter
    channel.send(greeter.greet("you"))

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        child = context.Process(target=greet, args=(theirs,))
        child.start()
        print(method, ours.recv())
        child.join()
    for how in (["program.py"], ["-m", "program"], ["-c", "import program"]):
        print(how[0], subprocess.run([sys.executable, *how], capture_output=True, text=True).stdout.strip())
    print([name for name in sys.modules if name.partition(".")[0] in ("megapatch", "wrapt", "greeter")])
"""


def environment(*folders, **more):
    """Return the environment with `folders` first on PYTHONPATH. An empty part would be the working directory.

    Without the first sign, so that standard error has only what `megapatch run` says.
    """
    known = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPATCH_")}
    path = [*map(str, folders), *filter(None, known.get("PYTHONPATH", "").split(os.pathsep))]
    return {**known, "PYTHONPATH": os.pathsep.join(path), "MEGAPATCH_QUIET": "1", **more}


def below(*folders, **more):
    """Return the environment of a process that `megapatch run` starts."""
    return reaching(environment(*folders, **more), {"greeter", "greeter2"})


def start(*command, env, **options):
    return subprocess.run(
        [str(word) for word in command],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        **options,
    )


def run(*command, env, **options):
    return start(sys.executable, "-m", "megapatch", "run", "--", *command, env=env, **options)
