"""All orders in which a target is imported, held, patched by others, reloaded and imported again, and megapatch
activated; run as a program, each order in a process of its own, under whatever starts this one.

    LONGEST=3 python -m rigs.import_orders    prints how many orders there are and what is wrong, as JSON

Environment variables, as not every program that starts it passes arguments on:

LONGEST  the most events in an order, besides the import of the target and megapatch's activation
HOOK     an import hook to install as well, right before and right after megapatch is activated: see HOOKS

An order is a string with one letter for each event:

    T  the target is imported              L  in place of T: it is put into sys.modules by importlib's LazyLoader
    A  megapatch is activated              H  another module does `from target import greet`
    F  someone patches the target, with functools.wraps; G  without
    R  importlib.reload(target)            D  del sys.modules[target], and import it again
    K  an import hook of others is installed, and some other module imported (tests/test_missed.py is without that)
"""

import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import traceback
import types
from pathlib import Path

EVENTS = "HFGRD"

LEFT_OUT = {
    "an event before the target is imported": "it would import the target itself, or there is nothing to change",
    "T after L, or L after T": "the module is in sys.modules, so the second does nothing",
    "an event twice": "the second meets what the first met, with a longer chain of wrappers",
    "more than three events": "all 3,914 orders of up to five were run once: no other result",
    "a second activation": "it is apply(), with which each order ends",
    "a thread for each event": "tests/test_threads.py: the import system puts them in one of these orders",
}
"""The orders that are not run, and why not."""


def orders(longest=3, hook=False):
    """Yield each order once."""
    for count in range(longest + 1):
        for events in itertools.permutations(EVENTS, count):
            for first in "TL":
                sequence = first + "".join(events)
                for position in range(len(sequence) + 1):
                    for active in ("KA", "AK") if hook else ("A",):
                        yield sequence[:position] + active + sequence[position:]


class Expected:
    """Return the expected end of an order, in terms of who has wrapped the function, from inside to outside."""

    def __init__(self):
        self.version, self.chain = 0, ""  # of the module that is in sys.modules; ! is megapatch, ? another
        self.held = None  # version and chain of what the holder has
        self.active = False

    def do(self, event):
        if event in "TL":
            self._load()
        elif event == "A":
            self.active = True
            if self.version:
                self._patch()
        elif event == "H":
            self.held = self.version, self.chain
        elif event in "FG":
            self.chain += "?" if event == "F" else "~"
        elif event == "R":
            self.version, self.chain = self.version + 1, ""
        elif event == "D":
            self._load()

    def _load(self):
        self.version, self.chain = self.version + 1, ""
        if self.active:
            self._patch()

    def _patch(self):
        if self.held == (self.version, self.chain):  # what the holder has is what is replaced
            self.held = self.version, self.chain + "!"
        self.chain += "!"

    @property
    def statuses(self):
        if "!" not in self.chain:  # only a reload does that; a stranger without functools.wraps hides the new code
            return ("overwritten",) if "~" in self.chain else ("missed",)
        return ("applied",)

    def apply(self):
        if self.statuses == ("missed",):
            self._patch()


# ------------------------------------------------------------------------------------------ one order
TARGET = "megapatch_ordered_target"
HOLDER = "megapatch_ordered_holder"


def found_in(order, hook):
    """Do what the order says. Return lists of what is expected and of what is found, for equality."""
    from rigs.engine import make_engine, make_patch, status_of

    engine, expected = make_engine(make_patch(TARGET)), Expected()
    for event in order:
        if event == "A":
            engine.activate()
        elif event == "K":
            HOOKS[hook]()
            importlib.import_module("colorsys")
            continue
        else:
            DEEDS[event]()
        expected.do(event)
    target = sys.modules[TARGET]
    told = [target.greet("you"), status_of(engine)]
    wanted = ["hello you" + expected.chain, *expected.statuses]
    expected.apply()
    engine.apply()
    told += [target.greet("you"), status_of(engine)]
    wanted += ["hello you" + expected.chain, *expected.statuses]
    if expected.held:
        told.append(sys.modules[HOLDER].greet("you"))
        wanted.append("hello you" + expected.held[1])
    wanted.append("hello you" + expected.chain.replace("!", ""))
    told.append(restored(engine, expected, target))
    return wanted, told


def restored(engine, expected, target):
    """Return what the target says after restore(), which refuses while someone's wrapper is on top."""
    from megapatch import RestoreError

    try:
        engine.restore()
    except RestoreError as error:
        rightly = expected.chain.partition("!")[2] or "!" not in expected.chain
        return "hello you" + expected.chain.replace("!", "") if rightly else f"refused: {error}"
    return target.greet("you")


def load_lazily():
    spec = importlib.util.find_spec(TARGET)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[TARGET] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def hold():
    module = sys.modules[HOLDER] = types.ModuleType(HOLDER)
    exec(f"from {TARGET} import greet", vars(module))


def patch_as_others_do(mark, wraps):
    target = importlib.import_module(TARGET)
    greet = target.greet

    def greeted(*args):
        return greet(*args) + mark

    target.greet = functools.wraps(greet)(greeted) if wraps else greeted


def import_again():
    del sys.modules[TARGET]
    importlib.import_module(TARGET)


DEEDS = {
    "T": lambda: importlib.import_module(TARGET),
    "L": load_lazily,
    "H": hold,
    "F": lambda: patch_as_others_do("?", wraps=True),
    "G": lambda: patch_as_others_do("~", wraps=False),
    "R": lambda: importlib.reload(importlib.import_module(TARGET)),
    "D": import_again,
}


def install_typeguard():
    from typeguard import install_import_hook

    install_import_hook(TARGET)


def install_jaxtyping():
    from jaxtyping import install_import_hook

    install_import_hook(TARGET, None)


def install_beartype():
    from beartype.claw import beartype_package

    beartype_package(TARGET)


HOOKS = {"typeguard": install_typeguard, "jaxtyping": install_jaxtyping, "beartype": install_beartype}


# ------------------------------------------------------------------------------------------ all of them
def problem_of(order, hook):
    """Run an order in a fork of this process; return [order, expected, found], or None."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                wanted, told = found_in(order, hook)
            problem = None if wanted == told else [order, wanted, told]
        except BaseException:
            problem = [order, "no error", traceback.format_exc()]
        os.write(writing, json.dumps(problem).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text or f'["{order}", "an answer", "the process died"]')


def main():
    import logging

    import rigs.engine  # noqa: F401  (before the forks)

    logging.disable()
    longest, hook = int(os.environ["LONGEST"]), os.environ.get("HOOK")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{TARGET}.py").write_text('def greet(name):\n    return "hello " + name\n')
        sys.path.insert(0, folder)
        if hook:
            importlib.import_module(hook)
        done = [problem_of(order, hook) for order in orders(longest, bool(hook))]
    print(json.dumps({"orders": len(done), "problems": [problem for problem in done if problem]}))


if __name__ == "__main__":
    main()
