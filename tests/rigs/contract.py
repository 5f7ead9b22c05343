"""What each of our patches keeps on the real code, in ranks with these patches only.

A scenario is a function at module level that raises where it meets its patch's defect, and returns otherwise. It
imports what is patched inside. The orders of importing and activating are in tests/test_import_orders.py.
"""

import copy
import functools
import importlib
import inspect
import os
import pickle
import random
import sys
import threading
import traceback
import warnings
from types import FunctionType

import numpy
import torch

from megapatch import Patch, Site, Status
from megapatch._engine.added import AddedTarget
from megapatch._engine.engine import Engine
from megapatch._engine.settings import Settings
from megapatch._python.dotted import find
from megapatch._python.finding import find_module
from rigs.chosen import chosen
from rigs.imported import run_with_megatron
from rigs.log import Log
from rigs.renames import assert_renames_are_seen

# The megapatch that is active in the ranks is switched off: an installed patch would be applied twice.
ALONE = {"MEGAPATCH_DISABLE": "*", "MEGAPATCH_ONLY": "", "MEGAPATCH_STRICT": "", "MEGAPATCH_AUDIT": ""}


def check_family(patches, scenarios, setup, **env):
    """Check that each of a family's patches has its scenario, and keeps the contract with these variables set.

    And that no name of the framework's that a patch looks at can change unseen.
    """
    assert scenarios.keys() == set(patches)
    options = {"setup": setup, "env": {**ALONE, **env}}
    assert_renames_are_seen(patches[0].family, at_least=6 * len(patches), **options)
    check_contract(scenarios, **options)


def check_contract(scenarios, *, verified=(), env=ALONE, **options):
    """Check that patches keep the contract.

    - the defect shows without the patch, if the diagnosis says that it is needed, and not with it
    - a keyword that upstream adds to a target reaches the original
    - the replacement is a plain function with the original's signature that pickles and copies
    - the diagnosis leaves no trace, logs nothing, needs no process group, and says the same of patched code
    - `restore()` puts everything back, the identical objects

    Args:
        scenarios: by patch.
        verified: names of the patches whose defect `megapatch verify` shows by the same scenario.
        env, options: of `run_with_megatron`.
    """

    def in_a_rank(function, *args):
        (found,) = run_with_megatron(function, 1, *args, env=env, **options)
        return found

    scenarios = {patch: scenarios[patch] for patch in chosen(scenarios)}
    problems = in_a_rank(broken_by, tuple(scenarios))
    for patch, scenario in scenarios.items():
        if patch.name not in verified:
            problems += in_a_rank(broken_without, patch, scenario)
        problems += in_a_rank(broken_with_keyword, tuple(scenarios), patch, scenario)
    assert not problems, "the contract is broken:\n" + "\n".join(problems)


def import_targets(patches):
    for name in dict.fromkeys(site.module for patch in patches for site in patch.sites):
        if find_module(name) is not None:
            importlib.import_module(name)


def error_of(scenario):
    try:
        scenario()
    except BaseException:  # torch's CheckpointException is not an Exception
        return traceback.format_exc()
    return None


# ------------------------------------------------------------------------------------ with the scenario
def broken_without(rank, world_size, patch, scenario):
    """Check that the scenario fails exactly if the diagnosis says NEEDED."""
    engine = Engine([patch], Settings())
    engine.activate()
    import_targets([patch])
    needed = any(record.status is Status.APPLIED for record in engine.records)
    engine.restore()
    error = error_of(scenario)
    if needed is (error is not None):
        return []
    return [f"{patch.name}: needed is {needed}, and without the patch its scenario ends with {error}"]


def broken_with_keyword(rank, world_size, patches, patch, scenario):
    """Check that the scenario works when each target has a keyword more, with which everybody calls it."""
    called, reached = set(), set()
    engine = Engine([with_keyword(each, called, reached) for each in patches], Settings())
    engine.activate()
    import_targets([patch])
    if error := error_of(scenario):
        return [f"{patch.name}: with the patch, and a keyword more in its targets, its scenario fails:\n{error}"]
    return [f"{patch.name}: {path} does not pass on an added keyword" for path in sorted(called - reached)]


def with_keyword(patch, called, reached):
    """Return the same patch, whose targets take one keyword more and are always called with it."""
    sites = [
        Site(
            site.module,
            site.diagnose,
            {path: called_with_keyword(make, path, called, reached) for path, make in site.replace.items()},
            {**site.add},
            site.rebuild,
        )
        for site in patch.sites
    ]
    return Patch(patch.name, patch.doc, patch.upstream, tuple(sites), patch.changes_numbers)


def called_with_keyword(make, path, called, reached):
    def make_with_keyword(original):
        if not inspect.isfunction(original):
            return make(original)

        @functools.wraps(original)
        def accepting(*args, **kwargs):
            called.add(path)
            if kwargs.pop("added_upstream", False):
                reached.add(path)
            return original(*args, **kwargs)

        vars(accepting)["__signature__"] = with_parameter(inspect.signature(original), "added_upstream")
        replacement = make(accepting)

        @functools.wraps(replacement)
        def with_it(*args, **kwargs):
            return replacement(*args, **{"added_upstream": True, **kwargs})

        vars(with_it)["__wrapped__"] = original  # the real one, for inspect.signature()
        return with_it

    return make_with_keyword


def with_parameter(signature, name):
    if name in signature.parameters:  # of a patch below, on the same target
        return signature
    added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False)
    parameters = list(signature.parameters.values())
    at = len(parameters) - any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    return signature.replace(parameters=[*parameters[:at], added, *parameters[at:]])


# ------------------------------------------------------------------------------------ without it
def broken_by(rank, world_size, patches):
    torch.distributed.destroy_process_group()  # no diagnosis may need one
    engine = Engine(patches, Settings())
    import_targets(patches)
    problems, verdicts, before = [], {}, {}
    for record in engine.roster.sites:
        before[record], around = contents_of(record), surroundings()
        with Log("") as log:
            verdicts[record] = verdict_of(record)
        problems += [f"{record.patch.name}: its diagnosis logs {line}" for line in log.texts]
        after = surroundings()
        changed = [name for name in around if around[name] != after[name]] + changed_since(before[record], record)
        problems += [f"{record.patch.name}: its diagnosis changes {name}" for name in changed]
    engine.activate()
    for record, verdict in verdicts.items():
        for target in record.installed:
            problems += differences(target) if target.is_function else []
        if (again := verdict_of(record)) != verdict:
            problems.append(f"{record.patch.name}: once patched, its verdict is {again}; it was {verdict}")
    engine.restore()
    for record, contents in before.items():
        changed = changed_since(contents, record)
        problems += [f"{record.patch.name}: restore() leaves {name} changed" for name in changed]
    return problems


def differences(target):
    """Yield why the replacement cannot be used wherever the original can."""
    name, function, original = target.target, target.current, target.original
    if type(function) is not FunctionType:
        yield f"{name} is a {type(function).__name__}, not a plain function"
    if not isinstance(target, AddedTarget):
        if not takes_the_same(original, function):
            yield f"{name} has another signature: {inspect.signature(function)}"
        if inspect.getfullargspec(function).args != [
            each.name
            for each in inspect.signature(function).parameters.values()
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]:
            yield f"{name} has other arguments for getfullargspec(): {inspect.getfullargspec(function)}"
        if (function.__name__, function.__doc__) != (original.__name__, original.__doc__):
            yield f"{name} has lost its name or docstring (functools.wraps keeps them)"
    if copy.deepcopy(function) is not function:
        yield f"{name} is another object once copied"
    if "<locals>" not in getattr(original, "__qualname__", ""):  # it could be pickled by its name
        for pickler in filter(find_module, ("pickle", "cloudpickle")):
            try:
                if pickle.loads(importlib.import_module(pickler).dumps(function)) is not function:
                    yield f"{name} is another object once pickled by {pickler}"
            except Exception as error:
                yield f"{name} cannot be pickled by {pickler}: {error}"


def takes_the_same(original, function):
    """Return whether the replacement takes the same parameters.

    It may also have parameters of a later release, with defaults. A decorator with *args and **kwargs, which hides
    the function's parameters, may be replaced by a function that shows them.
    """
    theirs, ours = (
        {name: (one.kind, one.default) for name, one in inspect.signature(which).parameters.items()}
        for which in (original, function)
    )
    if {"args", "kwargs"} <= theirs.keys():
        return True
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    more = [default for name, (kind, default) in ours.items() if name not in theirs and kind not in collecting]
    kept = [(name, taken) for name, taken in ours.items() if name in theirs]
    return kept == list(theirs.items()) and inspect.Parameter.empty not in more


def verdict_of(record):
    module = sys.modules.get(record.site.module)
    return record.site.diagnose(module) if module else None


def contents_of(record):
    """Return the contents of the site's module and of the classes of its targets, by name."""
    if (module := sys.modules.get(record.site.module)) is None:
        return {}
    owners = {path.rpartition(".")[0] for path in record.site.paths}
    places = {"": module, **{path: find(module, path) for path in owners - {""}}}
    return {
        f"{module.__name__}:{path}{path and '.'}{name}": value
        for path, owner in places.items()
        for name, value in vars(owner).items()
    }


def changed_since(before, record):
    """Return the names whose object was replaced, added or removed."""
    now = contents_of(record)
    return [name for name in {**before, **now} if name not in now or before.get(name) is not now[name]]


def surroundings():
    of_others = {
        name for name in sys.modules if name.partition(".")[0] not in {*sys.stdlib_module_names, "megapatch"}
    }
    return {
        "the modules that are loaded": of_others,
        "the environment": dict(os.environ),
        "the working directory": (os.getcwd(), sorted(os.listdir())),
        "the import path": list(sys.path),
        "the warning filters": list(warnings.filters),
        "the threads": threading.active_count(),
        "Python's random numbers": random.getstate(),
        "numpy's random numbers": str(numpy.random.get_state()),
        "torch's random numbers": torch.get_rng_state().tolist(),
        "torch's process group": torch.distributed.is_initialized(),
        "torch's defaults": (torch.get_default_dtype(), torch.is_grad_enabled()),
    }
