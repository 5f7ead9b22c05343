"""Other holders of a replaced function: rebound, or told."""

from __future__ import annotations

import functools
import importlib
import types

import pytest
from rigs.engine import TARGET, activated, make_engine, make_patch, status_of

from megapatch._engine import holders
from megapatch._reporting.report import make_report

REGISTRY = """
from {target} import greet

HANDLERS = {{"greet": greet}}

class Desk:
    greet = greet
"""


def reached(engine):
    return make_report(engine.records).patches[0].sites[0]


@pytest.fixture
def target(modules):
    return importlib.import_module(modules.write(TARGET + "also_greet = greet\n"))


def test_names_that_held_the_original_are_rebound_and_reported(modules, target):
    holder = modules.write(f"from {target.__name__} import greet, greet as say\nother = 1\n", stem="holder")
    user = importlib.import_module(holder)
    engine = activated(make_patch(target.__name__))
    assert target.also_greet is user.greet is user.say is target.greet
    assert user.say("you") == "hello you!"
    assert sorted(reached(engine).rebound) == [f"{holder}:greet", f"{holder}:say", f"{target.__name__}:also_greet"]


def test_a_holder_that_changes_meanwhile_is_neither_rebound_nor_reported(modules, target, monkeypatch):
    user = importlib.import_module(modules.write(f"from {target.__name__} import greet\n", stem="holder"))
    find = holders.find

    def find_and_lose_one(*arguments):
        found = find(*arguments)
        user.greet = print
        return found

    monkeypatch.setattr(holders, "find", find_and_lose_one)
    engine = activated(make_patch(target.__name__))
    assert user.greet is print
    assert list(reached(engine).rebound) == [f"{target.__name__}:also_greet"]


def test_an_alias_of_a_method_is_rebound_and_one_of_an_inherited_function_is_not(modules):
    source = TARGET + "class Heir(Greeter):\n    pass\nalias = Greeter.greet\n"
    target = importlib.import_module(name := modules.write(source))
    original = target.alias
    engine = activated(make_patch(name, "Heir.greet"))
    assert target.alias is original  # who took the parent's function means the parent's
    engine.restore()
    make_engine(make_patch(name, "Greeter.greet")).activate()
    assert target.alias is target.Greeter.greet is not original


AN_ACTOR_OF_RAY = """
def traced(method):
    def _resume_span(self, *args):
        return method(self, *args) if method else empty
    return _resume_span
    empty = None

class Late(Greeter):
    pass

class Actor(Late):
    __ray_actor_class__ = Late
    greet = traced(Greeter.greet)

class Idle(Greeter):
    __ray_actor_class__ = Greeter
"""


def test_a_class_that_ray_has_made_gets_the_replacement_and_gives_it_back(modules):
    target = importlib.import_module(name := modules.write(TARGET + AN_ACTOR_OF_RAY))
    (cell,) = (cell for cell in target.Actor.greet.__closure__ if cell != types.CellType())
    original = target.Greeter.greet
    engine = activated(make_patch(name, "Greeter.greet"))
    assert cell.cell_contents is target.Greeter.greet is not original
    assert target.Actor().greet("you") == "hello you!"
    assert list(reached(engine).rebound) == [f"{name}:Actor.greet (Ray's actor class)"]
    engine.restore()
    assert cell.cell_contents is original


def test_a_closure_in_another_subclass_keeps_what_it_holds(modules):
    target = importlib.import_module(
        name := modules.write(TARGET + AN_ACTOR_OF_RAY.replace("    __ray_actor_class__ = Late\n", ""))
    )
    activated(make_patch(name, "Greeter.greet"))
    assert target.Actor().greet("you") == "hello you"


def test_what_someone_else_has_put_there_in_the_meantime_stays():
    table = {"greet": "old"}
    assert not holders.Holder("here", table, "greet").swap("other", "new")
    assert table == {"greet": "old"}


def test_what_is_out_of_reach_is_reported(modules, target):
    name = modules.write(REGISTRY.format(target=target.__name__) + "LIST = [greet]\n", stem="registry")
    user = importlib.import_module(name)
    user.object = type("Custom", (), {})()
    vars(user.object)["callback"] = target.greet
    greet, greeter = target.greet, target.Greeter()
    bound = greeter.greet

    def closure():
        return greet

    partial = functools.partial(target.greet, "you")
    engine = activated(make_patch(target.__name__, "greet", "Greeter.greet"))
    told = "\n".join(reached(engine).out_of_reach)
    for expected in (
        f"a dict ({name}:HANDLERS) holds the original of {target.__name__}:greet",
        f"a list ({name}:LIST) holds the original of {target.__name__}:greet",
        "a functools.partial holds",
        f"a dict (class {name}.Desk) holds",
        "a closure (test_holders.test_what_is_out_of_reach_is_reported.<locals>.closure) holds",
        f"a bound method of a Greeter holds the original of {target.__name__}:Greeter.greet",
    ):
        assert expected in told.replace(f"{__name__}.", "test_holders.")
    assert "(attributes of a Custom) holds" in told or f"a Custom ({name}:object) holds" in told  # from 3.13 on
    assert f"out of reach: a list ({name}:LIST)" in str(make_report(engine.records))
    assert user.LIST[0]("you") == partial() == bound("you") == closure()("you") == "hello you"


def test_nothing_is_out_of_reach_in_a_usual_program(modules, target):
    engine = activated(make_patch(target.__name__, "greet", "Greeter.greet"))
    assert reached(engine).out_of_reach == ()


def test_the_search_for_holders_triggers_no_lazy_attribute(modules, target):
    lazy = modules.write("def __getattr__(name):\n    raise SystemError('loaded: ' + name)\n", stem="lazy")
    importlib.import_module(lazy)
    engine = activated(make_patch(target.__name__))
    assert target.greet("you") == "hello you!"
    assert status_of(engine) == "applied"


def test_holders_are_searched_once_for_all_patches(modules, target, monkeypatch):
    other = importlib.import_module(modules.write(TARGET + "alias = greet\n"))
    sweeps = []
    find = holders.find
    monkeypatch.setattr(holders, "find", lambda objects, methods: sweeps.append(objects) or find(objects))
    engine = activated(make_patch(target.__name__), make_patch(other.__name__, name="test.other"))
    assert [len(originals) for originals in sweeps] == [2]
    assert other.greet("you") == other.alias("you") == "hello you!"
    engine.restore()
    assert [len(sought) for sought in sweeps if sought] == [2, 2]
    assert other.greet("you") == other.alias("you") == "hello you"


def test_a_name_for_the_topmost_of_several_patches_gets_the_original_back(modules, target):
    original = target.greet
    engine = activated(make_patch(target.__name__), make_patch(target.__name__, name="test.on-top"))
    assert target.greet("you") == "hello you!!"
    user = importlib.import_module(modules.write(f"from {target.__name__} import greet\n", stem="holder"))
    assert user.greet is target.greet
    engine.restore("test.on-top")
    assert user.greet is target.greet and user.greet("you") == "hello you!"
    engine.apply()
    assert user.greet is target.greet and user.greet("you") == "hello you!!"
    engine.restore()
    assert user.greet is target.greet is target.also_greet is original


@pytest.mark.parametrize("paths", [("greet",), ("Greeter.greet",)])
def test_what_nobody_else_refers_to_is_not_searched_for(modules, monkeypatch, paths):
    name = modules.write(TARGET)
    searched = []
    monkeypatch.setattr(holders, "find", lambda objects, methods: searched.extend(objects) or {})
    engine = activated(make_patch(name, *paths))
    importlib.import_module(name)
    assert status_of(engine) == "applied"
    assert searched == []


HELD = {
    "alias": "alias = greet",
    "dictionary": "table = {'greet': greet}",
    "default": "def call(function=greet): return function('you')",
    "closure": "def make(function): return lambda: function('you')\ncall = make(greet)",
    "bound": "held = Greeter().greet",
}


@pytest.mark.parametrize("how", HELD)
def test_what_something_refers_to_is_searched_for(modules, monkeypatch, how):
    name = modules.write(f"{TARGET}\n{HELD[how]}\n")
    searched = []
    monkeypatch.setattr(holders, "find", lambda objects, methods: searched.extend(objects) or {})
    activated(make_patch(name, "greet", "Greeter.greet"))
    importlib.import_module(name)
    assert len(searched) == 1
