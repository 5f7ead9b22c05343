"""Wrappers of others on top of a patch: ours is in effect only if a call can come to it; no report is stopped."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types

import pytest
import wrapt
from rigs.command import run
from rigs.engine import TARGET, activated, make_patch, status_of

from megapatch._reporting.report import make_report
from megapatch.patch import unpatched


@pytest.fixture
def target(modules):
    return importlib.import_module(modules.write(TARGET))


def other(*args):
    return "hello from another"


class Endless:
    """Each of its layers has another one below."""

    @property
    def __wrapped__(self):
        return Endless()


class Circular:
    def __init__(self):
        self.__wrapped__ = self


class Raising:
    def __getattribute__(self, name):
        raise RuntimeError(f"{name} of something that is gone")


class RaisingLayer:
    @property
    def __wrapped__(self):
        raise RuntimeError("the connection is closed")


# ------------------------------------------------------------------------------------------ that lie
_kept, _state = {}, types.SimpleNamespace()


def wrapping(call, before="", after=""):
    """Return a decorator whose wrapper says what it wraps, and calls what this expression names."""
    source = f"""
def wrap(below):
    {before}
    @functools.wraps(below)
    def shout(*args):
        return {call}(*args)
    {after}
    return shout
"""
    names = {
        "functools": functools,
        "inspect": inspect,
        "sys": sys,
        "other": other,
        "kept": _kept,
        "state": _state,
    }
    exec(source, names)
    return names["wrap"]


def holds_another(below):
    def shout(*args):
        return held(*args)

    held = other
    return functools.update_wrapper(shout, below)


class Instance:
    def __init__(self, below):
        functools.update_wrapper(self, below)

    def __call__(self, *args):
        return other(*args)


LIES = {"names another": wrapping("other"), "holds another": holds_another, "an instance": Instance}


# ------------------------------------------------------------------------------------------ that call it
def in_a_closure(below):
    @functools.wraps(below)
    def shout(*args):
        return below(*args)

    return shout


def two_decorators(below):
    return in_a_closure(functools.lru_cache(in_a_closure(below)))


def in_a_default(below):
    @functools.wraps(below)
    def shout(*args, _greet=below):
        return _greet(*args)

    return shout


def in_a_position(below):
    @functools.wraps(below)
    def shout(name, _greet=below):
        return _greet(name)

    return shout


class InstanceThatCalls(Instance):
    def __init__(self, below):
        super().__init__(below)
        self.below = below

    def __call__(self, *args):
        return self.below(*args)


class InstanceByWrapped(Instance):
    def __call__(self, *args):
        return self.__wrapped__(*args)


class InstanceByProperty(Instance):
    def __init__(self, below):
        super().__init__(below)
        _kept["greet"] = [below]

    def __call__(self, *args):
        return self.kept(*args)

    @property
    def kept(self):
        return _kept["greet"][0]


def an_argument_of_a_partial(below):
    return functools.update_wrapper(functools.partial(_call, below), below)


def an_option_of_a_partial(below):
    return functools.update_wrapper(functools.partial(_call_by_name, function=below), below)


def _call(function, *args):
    return function(*args)


def _call_by_name(*args, function):
    return function(*args)


def a_proxy(below):
    return wrapt.FunctionWrapper(below, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))


def a_context_manager(below):
    import contextlib

    @contextlib.contextmanager
    def timed():
        yield

    return timed()(below)


def compiled(below):
    torch = pytest.importorskip("torch")
    return torch.compile(below, backend="eager")


def without_gradients(below):
    torch = pytest.importorskip("torch")
    return torch.no_grad()(below)


CALLS = {
    "in a closure": in_a_closure,
    "two decorators": two_decorators,
    "by __wrapped__": wrapping("shout.__wrapped__"),
    "by inspect.unwrap()": wrapping("inspect.unwrap(shout)"),
    "in a global dictionary": wrapping("kept['greet'][0]", "kept['greet'] = [below]"),
    "in a default": in_a_default,
    "in an attribute": wrapping("shout.original", after="shout.original = below"),
    "in an object": wrapping("state.original", "state.original = below"),
    "beside the target": wrapping(
        "sys.modules[shout.__module__]._old_greet", "sys.modules[below.__module__]._old_greet = below"
    ),
    "an instance": InstanceThatCalls,
    "an instance by __wrapped__": InstanceByWrapped,
    "an instance by a property": InstanceByProperty,
    "a partial": functools.partial,
    "an argument of a partial": an_argument_of_a_partial,
    "an option of a partial": an_option_of_a_partial,
    "a proxy": a_proxy,
    "a context manager": a_context_manager,
    "compiled": compiled,
    "without gradients": without_gradients,
}


@pytest.mark.parametrize("wrap", LIES.values(), ids=LIES)
def test_a_wrapper_that_never_calls_ours_has_overwritten_it(wrap, target, caplog):
    engine = activated(make_patch(target.__name__))
    ours = target.greet
    target.greet = wrap(ours)
    assert target.greet("you") == "hello from another"
    assert status_of(engine) == "overwritten"
    (patch,) = make_report(engine.records).patches
    assert patch.sites[0].targets == ()
    assert "replaced after megapatch" in caplog.text
    target.greet = ours  # as a mock ends
    assert status_of(engine) == "applied"


@pytest.mark.parametrize("wrap", CALLS.values(), ids=CALLS)
def test_a_wrapper_that_calls_ours_leaves_it_in_effect(wrap, target):
    engine = activated(make_patch(target.__name__))
    target.greet = wrap(target.greet)
    assert status_of(engine) == "applied"
    assert make_report(engine.records).patches[0].sites[0].targets == (f"{target.__name__}:greet",)


@pytest.mark.parametrize("wrap", [in_a_closure, in_a_default, in_a_position], ids=lambda wrap: wrap.__name__)
def test_so_does_one_that_does_not_say_what_it_wraps(wrap, target):
    engine = activated(make_patch(target.__name__))
    function = wrap(target.greet)
    del function.__wrapped__
    target.greet = function
    assert target.greet("you") == "hello you!"
    assert status_of(engine) == "applied"
    (foreign,) = make_report(engine.records).patches[0].sites[0].foreign
    assert foreign.startswith(f"{__name__} (") and "has wrapped" in foreign


def test_nor_does_one_that_takes_it_from_a_global(target):
    engine = activated(make_patch(target.__name__))
    names = {"greet_before": target.greet}
    exec("def greet(name):\n    return greet_before(name)", names)
    target.greet = names["greet"]
    assert status_of(engine) == "applied"
    names["greet_before"] = len
    assert status_of(engine) == "overwritten"


def test_a_method_that_is_kept_beside_it(target):
    engine = activated(make_patch(target.__name__, "Greeter.greet"))
    target.Greeter._old_greet = target.Greeter.greet

    def shout(self, *args):
        return self._old_greet(*args) + "?"

    target.Greeter.greet = functools.wraps(target.Greeter.greet)(shout)
    assert target.Greeter().greet("you") == "hello you!?"
    assert status_of(engine) == "applied"


# ------------------------------------------------------------------------------------------ that stop a report
@pytest.mark.parametrize("kind", [Endless, Circular, Raising, RaisingLayer], ids=lambda kind: kind.__name__)
def test_a_report_survives_whatever_is_there(kind, target):
    engine = activated(make_patch(target.__name__))
    target.greet = kind()
    assert status_of(engine) == "overwritten"
    assert "overwritten" in str(make_report(engine.records))
    assert unpatched(target.greet) is target.greet
    engine.apply()


@pytest.mark.parametrize("kind", [Endless, Circular, Raising, RaisingLayer], ids=lambda kind: kind.__name__)
def test_whatever_is_there_before_a_patch_does_not_stop_others(kind, target):
    target.greet = kind()
    engine = activated(
        make_patch(target.__name__), make_patch(target.__name__, "Greeter.greet", name="test.other")
    )
    assert target.Greeter().greet("you") == "hello you!"
    assert str(make_report(engine.records))


def test_the_facts_of_ranks_survive_an_endless_chain():
    """In a process of its own, where Megatron's patches are looked for."""
    code = """
import sys, types
import megapatch
module = types.ModuleType("slime.backends.megatron_utils.model")
module.__spec__ = None

class Endless:
    @property
    def __wrapped__(self):
        return Endless()

module.train = module.save = Endless()
sys.modules[module.__name__] = module
megapatch.apply()
from megapatch._reporting.facts import look
print(len(look()) > 2)
print(megapatch.report().digest)
"""
    done = run("-c", code)
    assert done.stdout.split()[:1] == ["True"], done.stderr
