"""The walk over all that can be reached: what it sees, and that two processes see the same."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from rigs.walker import changed, copies, of_modules, of_process, walk
from rigs.where import TESTS


class Thing:
    """An object whose attributes each test changes."""

    __slots__ = ("__dict__", "__weakref__", "slot")

    def __init__(self):
        self.a, self.b = [1, "two"], {"x": 3.0}
        self.weight = torch.nn.Parameter(torch.arange(4.0))
        self.view = self.weight.view(2, 2)
        self.shares = self.weight.detach()[1:]
        self.same = self.a
        self.bound = self.method
        self.weak = weakref.ref(self.weight)
        self.partial = functools.partial(max, 1, key=abs)
        self.layer = torch.nn.Linear(2, 2)
        self.numbers = {self.weight: 1}
        self.group = {self.layer, self.weight}
        self.slot = 5

    def method(self):
        return self

    def made(self):
        return lambda: self


def replaced(thing):
    method = thing.method

    @functools.wraps(method)
    def patched_method():
        return method()

    thing.method = patched_method


def captured(thing):
    number = thing.a[0]
    thing.function = lambda: number


CHANGES = {
    "a value": (lambda thing: thing.a.append(3), "thing.a"),
    "a type": (lambda thing: setattr(thing, "a", tuple(thing.a)), "thing.a"),
    "an attribute": (lambda thing: setattr(thing, "_ours", None), "thing._ours"),
    "a slot": (lambda thing: setattr(thing, "slot", 6), "thing.slot"),
    "what is one object": (lambda thing: setattr(thing, "same", list(thing.a)), "thing.same"),
    "an order": (lambda thing: thing.b.update(y=thing.b.pop("x"), x=3.0), "thing.b['y']"),
    "a bit": (lambda thing: thing.weight.data[3].add_(2**-20), "thing.weight"),
    "a dtype": (lambda thing: setattr(thing, "shares", thing.shares.double()), "thing.shares"),
    "a storage": (lambda thing: setattr(thing, "shares", thing.shares.clone()), "thing.shares"),
    "requires_grad": (lambda thing: thing.weight.requires_grad_(False), "thing.weight"),
    "grad_fn": (lambda thing: setattr(thing, "view", thing.view.detach()), "thing.view.grad_fn"),
    "a gradient": (lambda thing: thing.view.sum().backward(), "thing.weight.grad"),
    "a tensor's hook": (lambda thing: thing.weight.register_hook(print), "thing.weight._backward_hooks"),
    "a hook of accumulation": (
        lambda thing: thing.weight.register_post_accumulate_grad_hook(print),
        "thing.weight._post_accumulate_grad_hooks",
    ),
    "a node's hook": (
        lambda thing: thing.view.grad_fn.next_functions[0][0].register_hook(print),
        "thing.view.grad_fn.next[0].hooks",
    ),
    "a module's hook": (lambda thing: thing.layer.register_forward_hook(print), "thing.layer._forward_hooks"),
    "a tensor's attribute": (lambda thing: setattr(thing.weight, "shared", True), "thing.weight.shared"),
    "a dead reference": (lambda thing: setattr(thing, "weak", weakref.ref(torch.ones(1))), "thing.weak"),
    "a partial's argument": (
        lambda thing: setattr(thing, "partial", functools.partial(max, 2)),
        "thing.partial.args",
    ),
    "another method": (lambda thing: setattr(thing, "bound", thing.layer.forward), "thing.bound"),
    "a wrapper on an instance": (replaced, "thing.method"),
    "a closure": (captured, "thing.function.<number>"),
    "a key": (lambda thing: thing.numbers.update({thing.shares: 2}), "thing.numbers[key 1]"),
    "an item of a set": (lambda thing: thing.group.remove(thing.layer), "thing.group"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name):
    change, place = CHANGES[name]
    thing = Thing()
    before = walk({"thing": thing})
    assert walk({"thing": thing}) == before
    change(thing)
    assert place in changed(before, walk({"thing": thing}))


def test_the_state_of_modules_and_of_the_process_is_seen(monkeypatch, tmp_path):
    def texts():
        return walk({**of_modules(["rigs.walker"]), "process": of_process()})

    before = texts()
    monkeypatch.setattr("rigs.walker.LONGEST", 201)
    monkeypatch.setenv("NEW", "1")
    torch.rand(1)
    with open(tmp_path / "file", "w"):
        found = changed(before, texts())
    expected = {"rigs.walker.LONGEST", "process.environment", "process.environment['NEW']", "process.files"}
    assert expected < set(found)
    assert "process.random[2]" in found


def test_functions_and_classes_under_their_own_names_are_these_names():
    thing = SimpleNamespace(function=replaced, kind=Thing, module=torch, builtin=len, method=Thing().method)
    found = walk({"thing": thing})
    name = f"{__name__}.replaced"
    assert (found["thing.function"], found["thing.builtin"]) == (f"function {name}", "function len")
    assert "thing.method.__func__" not in found  # its class has it


def test_what_is_apart_names_nothing_else():
    """Its places bear the mark, and what it shares with others has their path."""
    thing = Thing()
    before = walk({"thing": thing}, apart=["Thing.extra"])
    thing.extra = [thing.weight, Thing()]
    found = changed(before, walk({"thing": thing}, apart=["Thing.extra"]))
    assert found and all(place.startswith("thing.{Thing.extra}") for place in found)
    assert found["thing.{Thing.extra}[0]"] == (None, "is thing.weight")


def test_what_a_method_has_made_is_apart():
    thing = Thing()
    before = walk({"thing": thing}, apart=["Thing.made"])
    thing.function = thing.made()
    found = changed(before, walk({"thing": thing}, apart=["Thing.made"]))
    assert found["thing.function.{Thing.made}.<self>"] == (None, "is thing")


def test_of_what_is_volatile_the_type_is_read():
    thing = Thing()
    before = walk({"thing": thing}, volatile=["Thing.slot"])
    thing.slot = 7
    assert walk({"thing": thing}, volatile=["Thing.slot"]) == before
    thing.slot = 7.0
    assert changed(before, walk({"thing": thing}, volatile=["Thing.slot"])) != {}


def test_cycles_end():
    thing = Thing()
    thing.a.append(thing.a)
    thing.me = thing
    found = walk({"thing": thing})
    assert (found["thing.a[2]"], found["thing.me"]) == ("is thing.a", "is thing")


def test_copies():
    assert copies([1]) == ["yes", "yes"]
    assert copies(lambda: 1)[0].startswith(("PicklingError", "AttributeError"))
    assert "0x" not in copies(each for each in ())[0]


PROGRAM = """
import sys, torch
padding = [object() for _ in range(int(sys.argv[1]))]  # other addresses
from no_harm.test_walker import Thing
from rigs.walker import walk
hooks = [torch.nn.Linear(1, 1).register_forward_hook(print) for _ in range(int(sys.argv[1]) % 7)]
torch.manual_seed(1)
things = [Thing(), Thing()]
things[0].names = {f"name {number}" for number in range(9)}
things[0].layer.register_forward_hook(print)
for place, text in walk({"things": things}).items():
    print(place, text)
"""


def test_two_processes_see_the_same():
    def texts(number):
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, number]
        environment = {**os.environ, "PYTHONHASHSEED": number}
        return subprocess.run(
            command, cwd=TESTS, env=environment, capture_output=True, text=True, check=True
        ).stdout

    one = texts("1")
    assert len(one.splitlines()) > 50
    assert texts("10002") == one
