"""The share of many releases and modules that CI tests; each night everything is tested with everything.

With all Megatrons the diagnoses run, and the quick tests of TrainStep's parity. The other modules run with the
newest, and each that depends on Megatron's version with one of the rest, whose turn it is; the README's command
has run its quick tests with 0.16. Some that depend on it little run with the README's instead. Of the engine's
own tests, which need no Megatron, each module runs with the README's Python and with one of 3.10 and 3.13.

Of the releases of a framework each module runs with the newest and one of the others, and of the two shapes of
NeMo-RL's code with one. Of the largest grids every third case runs; with the newest, all correct trainers.
"""

from __future__ import annotations

import collections
import sys
import zlib

import pytest

from rigs.needs import TESTS, runs_without_megatron
from rigs.quick import OF_TRAIN_STEP, is_quick

MEGATRONS = ("0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18")  # all but the newest
README, OTHERS = (3, 11), ((3, 10), (3, 13))  # Pythons; 3.12 has the newest Megatrons
# On Megatron's version they depend little, or, of frameworks, not at all: with the newest; each night see tox.ini.
ONCE = ("verify/", "test_demo.py", "patches/nemo_rl/", "patches/roll/", "patches/slime/")
# So do these; each of their processes imports torch for the README's Python in half the time.
WITH_THE_READMES = ("testing/", "doctor/test_all", "reach/test_run", "test_agree", "test_first", "test_read_only")
READMES = "0.16"
OF_THESE_TWO = "no_harm/"  # with the newest and with 0.16: older ones lack half of what these programs do
ALWAYS = (
    "patches/megatron/test_diagnos",
    "patches/megatron/test_edits.py",
    "test_package.py",
    "test_verdicts.py",
)
QUICK_WITH_EACH = {node.partition("::")[0] for node in OF_TRAIN_STEP}


def has_its_turn(place: str, megatron: str, python: tuple[int, ...] = sys.version_info[:2]) -> bool:
    """Return whether a module of the tests, or a test, as pytest names them, runs with this Megatron, or without.

    A module does if any of its tests does.
    """
    minor = ".".join(megatron.split(".")[:2])
    module, _, test = place.removeprefix("tests/").partition("::")
    if module.startswith(ALWAYS):
        return True
    if python != README and (not megatron or (minor not in MEGATRONS and runs_without_megatron(TESTS / module))):
        return python == OTHERS[_turn(module, len(OTHERS))]
    if megatron and module.startswith(WITH_THE_READMES):
        return minor == READMES
    if minor not in MEGATRONS:
        return True
    if module.startswith(ONCE):
        return False
    if module in QUICK_WITH_EACH and (is_quick(place) or not test):
        return True
    if module.startswith(OF_THESE_TWO):
        return minor == READMES
    return minor == MEGATRONS[_turn(module, len(MEGATRONS))]


def with_other_releases(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of modules with releases that are not theirs, and shapes of NeMo-RL's code.

    Releases come in order, oldest first. Of the shapes each module runs with one.
    """
    releases, shapes = (collections.defaultdict(lambda: collections.defaultdict(list)) for _ in range(2))
    for item in items:
        for name, value in item.callspec.params.items() if hasattr(item, "callspec") else ():
            if hasattr(value, "ranks_of"):  # a Release, by whichever name; its module imports torch
                releases[item.module.__name__][value.name].append(item)
            elif name == "shape":
                shapes[item.module.__name__][value].append(item)
    left_out = set()
    for by_module, among in ((releases, slice(None, -1)), (shapes, slice(None))):
        for module, by_name in by_module.items():
            taking_turns = list(by_name)[among]
            for number, name in enumerate(taking_turns):
                if number != _turn(module, len(taking_turns)):
                    left_out.update(by_name[name])
    return left_out


def with_nightly(cases: list) -> list:
    """Return cases as parameters of a test: two of three are left to the night."""
    marks = [() if number % 3 == 0 else pytest.mark.nightly for number in range(len(cases))]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case, mark in zip(cases, marks, strict=True)
    ]


def chosen(request: pytest.FixtureRequest, *names: str) -> set:
    """Return the values of these parameters, of all tests of the fixture's module that run."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    values = [tuple(item.callspec.params.get(name) for name in names) for item in items]
    return {value if len(names) > 1 else value[0] for value in values}


def _turn(module: str, turns: int) -> int:
    """Return a module's turn, by its own name: a new module does not change those of the others."""
    return zlib.crc32(module.encode()) % turns
