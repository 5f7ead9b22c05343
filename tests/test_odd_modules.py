"""`sys.modules` holds odd things, and none of them fails a patch or is loaded by looking at it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

import pytest
from rigs.engine import TARGET, activated, make_patch, status_of

from megapatch.patches._ray_actors import actors_of


class WithoutDict(types.ModuleType):
    """As `py` 1.11 makes ``py.test``."""

    __dict__ = None


class RaisingDict(types.ModuleType):
    @property
    def __dict__(self):
        raise RuntimeError("the dictionary was read")


class Claims:
    """Not a module, though isinstance() says so."""

    __class__ = types.ModuleType


class Raising:
    @property
    def __class__(self):
        raise RuntimeError("the class was read")


class RaisingSpec(types.ModuleType):
    @property
    def __spec__(self):
        raise RuntimeError("the spec was read")


def lazily(name):
    spec = importlib.util.find_spec(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[WithoutDict, RaisingDict, Claims, Raising, types.SimpleNamespace, None])
def odd(request, monkeypatch):
    kind = request.param
    entry = kind("odd") if isinstance(kind, type) and issubclass(kind, types.ModuleType) else kind and kind()
    monkeypatch.setitem(sys.modules, "megapatch_test_odd", entry)


@pytest.mark.usefixtures("odd")
def test_a_search_passes_by_what_is_odd(modules):
    name = modules.write(TARGET)
    holder = importlib.import_module(modules.write(f"from {name} import greet\n", stem="holder"))
    engine = activated(make_patch(name))
    assert status_of(engine) == "applied"
    assert holder.greet("you") == "hello you!"


@pytest.mark.usefixtures("odd")
def test_so_does_a_search_for_ray_actors(modules, monkeypatch):
    ray = types.ModuleType("ray.actor")
    ray.ActorClass = type("ActorClass", (), {})
    monkeypatch.setitem(sys.modules, "ray.actor", ray)
    target = importlib.import_module(modules.write(TARGET))
    assert actors_of("Greeter")(target) == {}


@pytest.mark.parametrize("body", ["import sys\nsys.modules['megapatch_test_seen'] = 1\n", "raise RuntimeError\n"])
def test_a_lazy_module_stays_unloaded(modules, monkeypatch, body):
    monkeypatch.delitem(sys.modules, "megapatch_test_seen", raising=False)
    lazily(modules.write(body, stem="lazy"))
    target = importlib.import_module(name := modules.write(TARGET))
    engine = activated(make_patch(name))
    assert status_of(engine) == "applied"
    assert actors_of("Greeter")(target) == {}
    assert "megapatch_test_seen" not in sys.modules


def test_an_odd_target_does_not_break_the_import_of_another(modules, monkeypatch, caplog):
    odd, name = "megapatch_test_odd", modules.write(TARGET)
    monkeypatch.setitem(sys.modules, odd, RaisingSpec(odd))
    activated(make_patch(odd, name="test.odd"), make_patch(name))
    assert importlib.import_module(name)
    assert "patches could not be considered" in caplog.text and "the spec was read" in caplog.text
