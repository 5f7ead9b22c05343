"""Patches of others in Megatron and torch, on megapatch's targets or not."""

from __future__ import annotations

import functools
import sys
import types

import pytest

from megapatch._reporting.foreign import patched_by_others

MEGATRON = """
import functools
from framework_decorators import decorated

def plain(): ...
@decorated
def decorated_by_megatron(): ...
class Optimizer:
    def step(self): ...
    @staticmethod
    def chain(): ...
    @property
    def config(self): ...
"""
DECORATORS = """
import functools
def decorated(function):
    @functools.wraps(function)
    def wrapper(): return function()
    return wrapper
"""
FRAMEWORK = """
import functools
def other(*args): ...
def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args): return function(*args)
    return wrapper
"""


@pytest.fixture
def loaded(monkeypatch):
    """Megatron's module and a framework's, in sys.modules."""

    def module(name, source):
        made = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        # Where a module's source cannot be read, only the modules that it holds are known.
        exec(source, vars(made))
        return made

    decorators = module("framework_decorators", DECORATORS)
    megatron = module("megatron.core.made_up", MEGATRON)
    megatron.framework_decorators = decorators
    return megatron, module("framework.patches", FRAMEWORK)


def found(megatron):
    return patched_by_others([("megatron.core.made_up", megatron), ("elsewhere", megatron)])


def test_megatrons_own_code_is_not_listed(loaded):
    assert found(loaded[0]) == []


def test_what_was_replaced_or_wrapped_is_listed(loaded):
    megatron, framework = loaded
    megatron.plain = framework.other
    megatron.Optimizer.step = framework.wrapping(megatron.Optimizer.step)
    megatron.Optimizer.chain = staticmethod(framework.other)
    megatron.Optimizer.config = property(framework.other)
    megatron.decorated_by_megatron = framework.wrapping(megatron.decorated_by_megatron)
    targets = ("Optimizer.chain", "Optimizer.config", "Optimizer.step", "decorated_by_megatron", "plain")
    assert found(megatron) == [("framework.patches", f"megatron.core.made_up:{target}") for target in targets]


def test_what_megapatch_patched_is_not_listed(loaded):
    megatron, framework = loaded

    def patched_plain():
        """Of megapatch, by its globals."""

    ours = types.FunctionType(patched_plain.__code__, {"__name__": "megapatch.patches.megatron.made_up"})
    megatron.plain = functools.wraps(megatron.plain)(ours)
    assert found(megatron) == []
    megatron.plain = framework.wrapping(megatron.plain)
    assert found(megatron) == [("framework.patches", "megatron.core.made_up:plain")]


def test_an_object_that_answers_for_its_class_is_not_asked(loaded):
    class Warns:
        @property
        def __class__(self):
            raise AssertionError("asked")

    megatron, framework = loaded
    megatron.deprecated, megatron.plain = Warns(), framework.other
    assert found(megatron) == [("framework.patches", "megatron.core.made_up:plain")]


def test_modules_that_cannot_be_looked_at_are_left_out(loaded):
    class Odd(types.ModuleType):
        pass

    assert patched_by_others([("megatron.core.odd", Odd("odd")), ("megatron.core.none", None)]) == []
