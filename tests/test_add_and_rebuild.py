"""Targets that are added where nothing was, and objects that are rebuilt of what was changed."""

from __future__ import annotations

import functools
import importlib

import pytest
from rigs.engine import activated, make_engine, needed, status_of

from megapatch import Patch, RestoreError, Site
from megapatch._reporting.report import make_report

SOURCE = f"""
from {__name__} import Actor

class Base:
    def greet(self):
        raise NotImplementedError

class Worker(Base):
    def name(self):
        return "worker"

actor = Actor(Worker)
"""


class Actor:
    """Takes the methods that a class has when it is made, as Ray does."""

    def __init__(self, cls):
        self.methods = {name: value for name, value in vars(cls).items() if callable(value)}
        self.cls = cls


def greet(self):
    return f"hello {self.name()}"


def louder(name):
    def patched_greet(self):
        return name(self) + "!"

    return patched_greet


def again(actor):
    return type(actor)(actor.cls)


def fails(actor):
    raise LookupError("no such actor")


def rebuilding(module, rebuild=again):
    return {f"{module.__name__}:actor": rebuild}


def patch_for(name, rebuild=again):
    site = Site(
        name,
        needed,
        replace={"Worker.name": louder},
        add={"Worker.greet": f"{__name__}:greet"},
        rebuild=functools.partial(rebuilding, rebuild=rebuild),
    )
    return Patch("test.greeting", "Workers greet.", "https://example.com/issues/1", sites=(site,))


@pytest.fixture
def name(modules):
    return modules.write(SOURCE)


def test_what_is_rebuilt_has_what_was_added_and_replaced(modules, name):
    target = importlib.import_module(name)
    other = importlib.import_module(modules.write(f"from {name} import actor\n", stem="other"))
    worker = target.Worker()
    activated(patch_for(name))
    assert target.actor.methods["greet"] is greet
    assert target.actor.methods["name"](worker) == "worker!"
    assert worker.greet() == "hello worker!"
    assert other.actor is target.actor


def test_restore_deletes_what_was_added_and_gives_back_what_was_rebuilt(modules, name):
    target = importlib.import_module(name)
    other = importlib.import_module(modules.write(f"from {name} import actor\n", stem="other"))
    before = dict(vars(target.Worker)), target.actor
    engine = activated(patch_for(name))
    engine.restore()
    assert (dict(vars(target.Worker)), target.actor) == before
    assert other.actor is before[1]
    with pytest.raises(NotImplementedError):
        target.Worker().greet()


def test_what_only_an_earlier_build_leads_to_is_not_out_of_reach(modules):
    methods = "    def end(self):\n        return 'bye'\n\n    def other(self, known=[]):\n        pass\n\nactor ="
    name = modules.write(SOURCE.replace("actor =", methods))
    target = importlib.import_module(name)
    site = Site(name, needed, replace={"Worker.end": louder}, rebuild=rebuilding)
    ending = Patch("test.ending", "Workers end.", "https://example.com/issues/2", sites=(site,))
    engine = make_engine(patch_for(name), ending)
    original = target.Worker.name
    engine.activate()
    assert not out_of_reach(engine)

    class_of_no_module = type("Gone", (), {"__module__": "megapatch_test_gone"})
    target.Worker.other.__defaults__[0].extend((class_of_no_module, original))  # all builds have it
    assert out_of_reach(engine) == [f"a list holds the original of {name}:Worker.name"]


def out_of_reach(engine):
    sites = [site for patch in make_report(engine.records).patches for site in patch.sites]
    return [text for site in sites for text in site.out_of_reach]


def test_a_rebuild_that_fails_leaves_everything_as_it_was(name):
    target = importlib.import_module(name)
    before = dict(vars(target.Worker)), target.actor
    engine = activated(patch_for(name, rebuild=fails))
    assert (dict(vars(target.Worker)), target.actor) == before
    assert status_of(engine) == "failed"
    assert engine.records[0].reason == "LookupError: no such actor"


def test_a_module_gets_a_function(name):
    target, url = importlib.import_module(name), "https://example.com/issues/3"
    site = Site(name, needed, add={"greeting": f"{__name__}:greet"})
    engine = activated(Patch("test.greeting", "They greet.", url, sites=(site,)))
    assert target.greeting is greet
    engine.restore()
    assert not hasattr(target, "greeting")


def test_what_is_there_is_not_added(modules):
    name = modules.write(SOURCE + "Worker.greet = print\n")
    target = importlib.import_module(name)
    engine = activated(patch_for(name))
    assert status_of(engine) == "failed"
    assert "Worker.greet is to be added, and is there already" in engine.records[0].reason
    assert target.Worker().name() == "worker"


def test_a_reloaded_module_gets_all_of_it_again(name):
    target = importlib.import_module(name)
    engine = activated(patch_for(name))
    importlib.reload(target)
    assert status_of(engine) == "missed"
    engine.apply()
    assert status_of(engine) == "applied"
    assert target.Worker().greet() == "hello worker!"
    assert target.actor.methods["greet"] is greet


def farewell(self):
    return f"bye {self.name()}"


def test_two_patches_share_what_both_have_rebuilt(modules, name):
    target = importlib.import_module(name)
    other = importlib.import_module(modules.write(f"from {name} import actor\n", stem="other"))
    original = target.actor
    sites = [
        Site(name, needed, add={f"Worker.{method}": f"{__name__}:{method}"}, rebuild=rebuilding)
        for method in ("greet", "farewell")
    ]
    url = "https://example.com/issues/1"
    engine = make_engine(*(Patch(f"test.p{i}", "They talk.", url, sites=(site,)) for i, site in enumerate(sites)))

    def known():
        assert other.actor is target.actor
        return set(target.actor.methods) - {"name"}

    engine.activate()
    assert known() == {"greet", "farewell"}
    assert [record.status.value for record in engine.records] == ["applied", "applied"]
    engine.restore("test.p0")
    assert known() == {"farewell"}
    engine.apply()
    assert known() == {"greet", "farewell"}
    engine.restore("test.p1")
    assert known() == {"greet"}
    engine.restore()
    assert target.actor is other.actor is original

    importlib.reload(target)
    engine.apply()
    assert set(target.actor.methods) - {"name"} == {"greet", "farewell"}
    assert [record.status.value for record in engine.records] == ["applied", "applied"]


@pytest.mark.parametrize("attribute", ["Worker.greet", "actor", "the same kind of actor"])
def test_what_someone_has_put_in_our_place_is_told(name, attribute):
    target = importlib.import_module(name)
    engine = activated(patch_for(name))
    if attribute == "actor":
        target.actor = object()
    elif attribute == "Worker.greet":
        target.Worker.greet = len
    else:
        attribute, target.actor = "actor", again(target.actor)
    assert status_of(engine) == "overwritten"
    with pytest.raises(RestoreError, match=attribute):
        engine.restore()


@pytest.mark.parametrize("by", ["nothing", "a class"])
def test_what_replaces_an_added_function_alone_is_no_reload(name, by):
    target, site = importlib.import_module(name), Site(name, needed, add={"Worker.greet": f"{__name__}:greet"})
    engine = activated(Patch("test.greeting", "They greet.", "https://example.com/issues/4", sites=(site,)))
    if by == "nothing":
        del target.Worker.greet
    else:
        target.Worker = type("Worker", (target.Worker,), {"greet": len})
    assert status_of(engine) == "overwritten"
    with pytest.raises(RestoreError, match=r"Worker\.greet"):
        engine.restore()
