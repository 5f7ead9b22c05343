"""Others who have patched our targets, before megapatch or on top of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from rigs.engine import activated, make_engine, make_patch

from megapatch._reporting.report import make_report
from megapatch.patch import UNKNOWN, Verdict

TARGET = """
import contextlib, functools
from {helper} import decorator
import {other}

def own(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

@own
@decorator
@{other}.decorator
def greet(name):
    return "hello " + name

class Greeter:
    @contextlib.contextmanager
    def within(self):
        yield
    @staticmethod
    def static(name):
        return name
"""

RIVAL = """
import functools, wrapt

def decorator(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper

def replacement(*args):
    return "rival"

@wrapt.decorator
def proxied(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)

class Counter:
    def __init__(self, function):
        functools.update_wrapper(self, function)
    def __call__(self, *args):
        return self.__wrapped__(*args)

def partial(function):
    return functools.partial(decorator(function))
"""

PATHS = ("greet", "Greeter.within", "Greeter.static")


@pytest.fixture
def rival(modules):
    return importlib.import_module(modules.write(RIVAL, stem="rival"))


@pytest.fixture
def target(modules):
    helper, other = (
        modules.write(RIVAL, stem="helper") for _ in range(2)
    )  # libraries that the target itself uses
    return importlib.import_module(modules.write(TARGET.format(helper=helper, other=other)))


def told(engine, position=0):
    (site,) = make_report(engine.records).patches[position].sites
    return [text.replace(site.module, "target") for text in site.foreign]


def line(module, code):
    """Where the code begins that a decorator or a name stands for."""
    source = Path(module.__file__).read_text().splitlines()
    return f"{module.__name__} ({module.__file__}:{source.index(code) + 1})"


def test_upstreams_own_decorators_are_not_foreign(target):
    engine = make_engine(make_patch(target.__name__, *PATHS))
    assert told(engine) == []
    engine.activate()
    assert [record.status.value for record in engine.records] == ["applied"]
    assert told(engine) == []


def test_who_was_there_before_megapatch(target, rival):
    before = set(sys.modules)
    target.greet = rival.decorator(target.greet)
    engine = make_engine(make_patch(target.__name__))
    wrapped = f"{line(rival, '    @functools.wraps(function)')} has wrapped target:greet"
    assert told(engine) == [wrapped]
    engine.activate()
    assert told(engine) == [f"{wrapped} before megapatch"]
    assert not [name for name in set(sys.modules) - before if name.startswith("torch")]


@pytest.mark.parametrize(
    ("made", "who"),
    [
        ("proxied", "@wrapt.decorator"),
        ("partial", "    @functools.wraps(function)"),
        ("Counter", None),
    ],
)
def test_whatever_it_is_made_of(target, rival, made, who):
    target.greet = getattr(rival, made)(target.greet)
    engine = make_engine(make_patch(target.__name__))
    where = line(rival, who) if who else rival.__name__
    assert f"{where} has wrapped target:greet" in told(engine)


def test_who_had_replaced_a_target(target, rival):
    target.Greeter.static = rival.replacement
    engine = activated(
        make_patch(target.__name__, *PATHS, diagnose=lambda module: Verdict(UNKNOWN, "what is it?"))
    )
    assert told(engine) == [f"{line(rival, 'def replacement(*args):')} has replaced target:Greeter.static"]


def test_who_came_after_megapatch(target, rival):
    engine = activated(make_patch(target.__name__))
    ours = target.greet
    target.greet = rival.Counter(rival.decorator(ours))
    assert told(engine) == [
        f"{rival.__name__} has wrapped target:greet on top of megapatch",
        f"{line(rival, '    @functools.wraps(function)')} has wrapped target:greet on top of megapatch",
    ]
    target.greet = rival.replacement
    (text,) = told(engine)
    assert text == f"{line(rival, 'def replacement(*args):')} has replaced target:greet on top of megapatch"
    del target.greet
    assert told(engine) == []  # the status tells that nothing is left
    target.greet = ours
    assert told(engine) == []


def test_another_patch_of_ours_is_not_foreign(target):
    engine = activated(make_patch(target.__name__), make_patch(target.__name__, name="test.louder-still"))
    assert target.greet("you") == "hello you!!"
    assert told(engine, 0) == told(engine, 1) == []


def test_a_loop_ends(target, rival):
    one, other = rival.decorator(target.greet), rival.decorator(target.greet)
    one.__wrapped__, other.__wrapped__ = other, one
    target.greet = one
    assert len(told(make_engine(make_patch(target.__name__)))) == 2
