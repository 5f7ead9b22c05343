"""A patch leaves arguments that it does not know to upstream: they meet the original's own outcome.

Tests of Megatron's and of frameworks call patched functions with Mocks, and with objects that have almost nothing.
The object of a method is of its class here.
"""

import asyncio
import contextlib
import importlib
import inspect
import re
import traceback
from pathlib import Path
from types import CoroutineType, GeneratorType
from unittest import mock

import pytest
import torch
from rigs.areal import engine as areal
from rigs.chosen import all_are_chosen, chosen
from rigs.imported import after_megatron
from rigs.ms_swift import trainer as ms_swift
from rigs.nemo_rl.worker import find_nemo_rl
from rigs.roll.strategy import find_roll
from rigs.skyrl import releases as skyrl
from rigs.slime.train import find_slime
from rigs.verl import engine as verl

import megapatch
from megapatch import audit
from megapatch._engine.engine import this_process
from megapatch._engine.target import ReplacedTarget
from megapatch.patch import unpatched
from megapatch.patches import PATCHES
from megapatch.testing import run_ranks

OURS = str(Path(megapatch.__file__).parent)
CHANGING = re.compile(r"0x[0-9a-f]+|[\d.]{6,}")  # addresses, numbers of objects, times
STEPS = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict"
METADATA = "megatron.core.dist_checkpointing.strategies.torch:TorchDistLoadShardedStrategy.load_tensors_metadata"
EXCEPTIONS = {
    STEPS: "adds the loaded steps to 0, and not to those of a made-up scheduler",
    METADATA: "reads the metadata itself, and where that fails lets the original meet the error",
    "megatron.core.optimizer:get_megatron_optimizer": "its deprecation warning is an error in our code only",
}


class Slots:
    __slots__ = ("param_groups",)

    def __init__(self):
        self.param_groups = []

    def load_state_dict(self, state_dict): ...


KINDS = {
    "a Mock": lambda name: mock.Mock(name=name),
    "a MagicMock": lambda name: mock.MagicMock(name=name),
    "a Mock with a spec": lambda name: mock.Mock(name=name, spec=torch.nn.Module),
    "a list of a Mock": lambda name: [mock.Mock(name=name)],
    "an object": lambda name: object(),
    "an object with slots": lambda name: Slots(),
    "None": lambda name: None,
}
ALONE = ("a Mock", "a list of a Mock", "an object with slots", "None")
"""What one argument is while the others are usual."""
USUAL = {"int": 1, "float": 1.0, "str": "constant", "lr_decay_steps": 2}
"""Arguments, by type and by name, with which the functions that check them do their work."""


def made_up(kind):
    """Return an object of a class that has every attribute, but those of which a patch takes it for busy."""

    def attribute(self, name):
        if name.startswith(("_megapatch", "_train_step_state")):
            raise AttributeError(name)
        return mock.MagicMock(name=name)

    derived = type(kind)(kind.__name__, (kind,), {"__init__": lambda self: None, "__getattr__": attribute})
    derived.__abstractmethods__ = frozenset()
    return object.__new__(derived)


def usual(parameter):
    """Return what an argument is while others are odd."""
    if parameter.default is not parameter.empty:
        return parameter.default
    kind = getattr(parameter.annotation, "__name__", parameter.annotation)
    known = [USUAL[name] for name in (parameter.name, kind) if name in USUAL]
    return known[0] if known else mock.MagicMock(name=parameter.name)


def calls(target):
    """Yield calls with odd arguments: a text that says what is odd, and a function that makes the arguments."""
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = [one for one in inspect.signature(target.original).parameters.values() if one.kind not in several]
    is_method = bool(parameters) and parameters[0].name == "self"
    given = parameters[is_method:]
    for kind, make in KINDS.items() if given else ():
        for odd in (given, *([parameter] for parameter in given if kind in ALONE)):

            def arguments(make=make, odd=odd):
                made = {one.name: make(one.name) if one in odd else usual(one) for one in given}
                return [made_up(target.parent)] if is_method else [], made

            yield f"{kind} for {', '.join(parameter.name for parameter in odd)}", arguments


def outcome(function, arguments):
    """Return what came of a call, in which lines of upstream's, and the calls of Mocks among its arguments."""
    positional, named = arguments()
    try:
        result = function(*positional, **named)
        if isinstance(result, GeneratorType):
            result = next(result, None)
        elif isinstance(result, CoroutineType):
            result = asyncio.run(result)
        elif isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, mock.Mock):
            with result as entered:
                result = entered
        found = ["returns", type(result).__name__, repr(result)]
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        places = [f"{frame.filename}:{frame.lineno}" for frame in frames if not frame.filename.startswith(OURS)]
        found = ["raises", type(error).__name__, str(error), *places]
    asked = [f"{one}: {one.mock_calls}" for value in (*positional, *named.values()) for one in mocks_in(value)]
    return [[CHANGING.sub("", text) for text in texts] for texts in (found, asked)]


def mocks_in(value):
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, mock.Mock)]


@after_megatron
def find_frameworks():
    find_slime()
    find_nemo_rl()
    find_roll()


def differences(rank, world_size, family=""):
    """Return how many functions are patched and watched, by all patches or those that begin so, and the faults."""
    torch.distributed.destroy_process_group()  # what communicates fails, with a patch and without
    for module in {site.module for patch in PATCHES if patch.name.startswith(family) for site in patch.sites}:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    megapatch.apply()
    patched = replaced_targets(family)
    found = in_each(patched)
    if family:
        return len(patched), 0, found
    audit.start()
    watched = {name: target for name, target in replaced_targets().items() if name not in patched}
    found |= in_each(watched, parts=1)  # the audit looks at what it is shown, and keeps its errors to itself
    return len(patched), len(watched), found


def replaced_targets(family=""):
    return {
        target.target: target
        for record in this_process().records
        if any(patch.name.startswith(family) for patch, _ in record.rows())
        for target in record.installed
        if type(target) is ReplacedTarget and target.target not in EXCEPTIONS
    }


def in_each(targets, parts=2):
    """Return what is different in calls with odd arguments, in some parts of their outcome."""
    found = {}
    for name, target in targets.items():
        patched = getattr(target.parent, target.attribute)
        for words, arguments in calls(target):
            for _ in range(2):  # the first call may leave something behind in upstream's own modules
                expected, seen = (
                    outcome(function, arguments)[:parts] for function in (unpatched(patched), patched)
                )
                if seen == expected:
                    break
            else:
                found[f"{name} with {words}"] = expected, seen
    return found


@pytest.mark.every_patch("megatron", "slime", "nemo_rl", "roll")
def test_odd_arguments_meet_upstreams_own_outcome(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "" if all_are_chosen() else tuple(patch.name for patch in chosen(PATCHES))
    options = {"setup": find_frameworks, "env": {"MEGAPATCH_AUDIT": ""}}
    ((patched, watched, found),) = run_ranks(differences, 1, names, **options)
    assert found == {}
    assert names or (patched > 60 and watched > 20)


FRAMEWORKS = {
    "areal.": (areal.RELEASES, "AREAL_RELEASE", areal.find_areal),
    "ms_swift.": (ms_swift.RELEASES, "SWIFT_RELEASE", ms_swift.find_swift),
    "skyrl.": (skyrl.RELEASES, "SKYRL_RELEASE", skyrl.find_skyrl),
    "verl.": (verl.RELEASES, "VERL_RELEASE", verl.find_verl),
}


@pytest.mark.every_patch("areal", "ms_swift", "skyrl", "verl")
@pytest.mark.parametrize("family", FRAMEWORKS)
def test_so_do_those_of_frameworks(family, tmp_path, monkeypatch):
    """On the newest release that is there."""
    releases, variable, setup = FRAMEWORKS[family]
    if not releases:
        pytest.skip(f"no release of {family} is there")
    monkeypatch.chdir(tmp_path)
    ((patched, _, found),) = releases[-1].ranks_of(variable, differences, 1, family, setup=setup)
    assert found == {}
    assert patched
