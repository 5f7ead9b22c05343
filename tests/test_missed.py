"""Modules that are loaded unpatched are patched later, never pending; odd things in sys.modules fail nothing."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import threading
import types

import pytest
from rigs.engine import TARGET, activated, make_engine, make_patch, status_of

from megapatch._engine import strict
from megapatch._engine.engine import Engine
from megapatch._engine.record import Unloaded
from megapatch._engine.settings import Settings
from megapatch._engine.watch import front_finder
from megapatch.errors import StrictError
from megapatch.patch import UNKNOWN, PatchInfo, Verdict
from megapatch.patches._ray_actors import actors_of


class LoadsItself:
    """An import hook that loads modules itself, as typeguard's and jaxtyping's do, first on sys.meta_path."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.PathFinder.find_spec(name, path, target) if name in self.names else None


@pytest.fixture
def in_front(monkeypatch):
    def install(*names):
        sys.meta_path.insert(0, LoadsItself(*names))

    before = list(sys.meta_path)
    yield install
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, LoadsItself)]
    assert set(map(id, before)) <= set(map(id, sys.meta_path))


def test_behind_another_import_hook_it_is_missed_until_the_next_import(modules, in_front, caplog):
    name, another, nothing = modules.write(TARGET), modules.write(""), modules.write("", stem="later")
    engine = activated(make_patch(name))
    in_front(name)
    target = importlib.import_module(name)
    assert target.greet("you") == "hello you"
    assert status_of(engine) == "missed"
    assert f"{name} is missed: loaded, and not patched" in caplog.text
    importlib.import_module(another)
    assert target.greet("you") == "hello you!"
    assert status_of(engine) == "applied"
    assert importlib.import_module(nothing)
    applier = threading.Thread(target=engine.apply, daemon=True)
    applier.start()
    applier.join(30)
    assert not applier.is_alive()  # nothing is held any more


def test_an_import_in_between_puts_megapatch_in_front_again(modules, in_front):
    name, another = modules.write(TARGET), modules.write("")
    (modules.folder / (namespace := f"{another}_folder")).mkdir()
    activated(make_patch(name))
    in_front(name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{another}_not_there")
    importlib.import_module(namespace)
    importlib.import_module(another)
    assert importlib.import_module(name).greet("you") == "hello you!"
    assert sys.meta_path.count(front_finder) == 1


def test_a_finder_that_imports_another_target_does_not_hide_it(modules, in_front):
    name, other, seen = modules.write(TARGET), modules.write(TARGET, stem="other"), []

    class Importing(LoadsItself):
        def find_spec(self, name, path=None, target=None):
            if name in self.names:
                seen.append(importlib.import_module(other).greet("you"))

    activated(make_patch(name), make_patch(other, name="test.other"))
    sys.meta_path.insert(1, Importing(name))
    assert importlib.import_module(name).greet("you") == "hello you!"
    assert seen == ["hello you!"]


@pytest.mark.filterwarnings("ignore:.*find_spec.. not found:ImportWarning")  # importlib's own, up to Python 3.11
def test_a_finder_without_find_spec_is_passed_over(modules, monkeypatch):
    """Import hooks of the time before Python 3.4 have find_module() alone."""
    name = modules.write(TARGET)
    activated(make_patch(name))
    of_old = types.SimpleNamespace(find_module=lambda name, path=None: None)
    monkeypatch.setattr(sys, "meta_path", [front_finder, of_old, *sys.meta_path[1:]])
    assert importlib.import_module(name).greet("you") == "hello you!"


def test_the_other_hook_still_loads_its_modules(modules, in_front):
    """Its finder is asked after ours, and its loader is used."""
    name, another = modules.write(TARGET), modules.write("")
    seen = []

    class Loader(importlib.machinery.SourceFileLoader):
        def exec_module(self, module):
            seen.append(module.__name__)
            super().exec_module(module)

    class Finder(LoadsItself):
        def find_spec(self, name, path=None, target=None):
            spec = super().find_spec(name, path, target)
            if spec is not None:
                spec.loader = Loader(name, spec.origin)
            return spec

    activated(make_patch(name))
    sys.meta_path.insert(0, finder := Finder(name))
    try:
        importlib.import_module(another)
        module = importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)
    assert module.greet("you") == "hello you!"
    assert seen == [name]
    assert type(module.__loader__) is type(module.__spec__.loader) is Loader  # ours does not stay in its place


def test_what_was_put_into_sys_modules_by_hand_is_missed_until_apply(modules, tmp_path):
    name = modules.write(TARGET)
    engine = activated(make_patch(name))
    spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert status_of(engine) == "missed"
    engine.apply()
    assert status_of(engine) == "applied"
    assert module.greet("you") == "hello you!"


def test_so_it_is_until_another_target_is_imported(modules, monkeypatch):
    name, other = modules.write(TARGET), modules.write(TARGET, stem="other")
    engine = activated(make_patch(name), make_patch(other, name="test.other"))
    monkeypatch.setitem(sys.modules, name, module := types.ModuleType(name))
    exec(TARGET, vars(module))
    assert status_of(engine) == "missed"
    importlib.import_module(other)
    assert module.greet("you") == "hello you!"


def test_a_patch_of_others_below_ours_that_is_undone(modules, caplog):
    """Without functools.wraps it looks as a reload does: the module's own function is there again."""
    target = importlib.import_module(name := modules.write(TARGET))
    greet = target.greet
    target.greet = lambda name: greet(name) + "?"
    engine = activated(make_patch(name))
    assert target.greet("you") == "hello you?!"
    target.greet = greet
    assert status_of(engine) in ("missed", "overwritten")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    engine.apply()
    assert status_of(engine) == "applied"
    assert target.greet("you") == "hello you!"


def test_strict_raises_where_a_late_look_finds_what_needs_attention(modules, in_front, monkeypatch):
    monkeypatch.setattr(strict, "_finder", strict._KeepsOut())
    name, another = modules.write(TARGET), modules.write("")

    def factory(original):
        raise ZeroDivisionError("a bug of ours")

    activated(make_patch(name, factory=factory), strict_value="1")
    in_front(name)
    importlib.import_module(name)
    with pytest.raises(StrictError, match="a bug of ours"):
        importlib.import_module(another)


def test_reloads_are_not_remembered_for_ever(modules):
    target = importlib.import_module(name := modules.write(TARGET))
    engine = activated(make_patch(name, "greet", "Greeter.greet"))
    sizes = []
    for _ in range(30):
        importlib.reload(target)
        engine.apply()
        sizes.append(len(engine.records[0].earlier))
    assert target.greet("you") == "hello you!"
    assert sizes[-1] == sizes[-10] > 2


def test_holders_of_before_a_reload_are_given_back_too(modules):
    target = importlib.import_module(name := modules.write(TARGET))
    engine = activated(make_patch(name))
    before = importlib.import_module(modules.write(f"from {name} import greet", stem="before"))
    importlib.reload(target)
    engine.apply()
    engine.restore()
    assert target.greet("you") == before.greet("you") == "hello you"


def test_strict_raises_where_the_import_of_another_target_finds_what_needs_attention(modules, monkeypatch):
    """A module that was half-loaded in our own thread is considered with the next one, which fails then."""
    monkeypatch.setattr(strict, "_finder", strict._KeepsOut())
    monkeypatch.setitem(sys.modules, "megapatch_test_caller", caller := types.ModuleType("caller"))
    name = modules.write("import megapatch_test_caller as caller; caller.engine.activate()\n" + TARGET)
    other = modules.write(TARGET, stem="other")
    bad = make_patch(name, diagnose=lambda module: Verdict(UNKNOWN, "it whispers otherwise"))
    caller.engine = make_engine(bad, make_patch(other, name="test.other"), strict_value="1")
    importlib.import_module(name)
    with pytest.raises(StrictError, match="it whispers otherwise"):
        importlib.import_module(other)


def test_a_late_look_does_not_wait_for_another_threads_import(modules, in_front, monkeypatch):
    """It holds the import lock of the module whose import made it look: the other thread may want that one."""
    monkeypatch.setitem(sys.modules, "megapatch_test_gate", gate := types.ModuleType("gate"))
    gate.reached, gate.go_on = threading.Event(), threading.Event()
    wait = "import megapatch_test_gate as gate\ngate.reached.set()\nassert gate.go_on.wait(30)\n"
    slow, missed, another = modules.write(wait), modules.write(TARGET), modules.write("")
    unloaded = Unloaded("acme", slow, (PatchInfo("acme", "", "", (slow,)),), load=tuple, names_are_known=False)
    Engine((make_patch(missed),), Settings(), [unloaded]).activate()
    in_front(missed)
    importlib.import_module(missed)
    importer = threading.Thread(target=importlib.import_module, args=(slow,), daemon=True)
    importer.start()
    assert gate.reached.wait(30)
    looker = threading.Thread(target=importlib.import_module, args=(another,), daemon=True)
    looker.start()
    looker.join(5)
    was_waiting = looker.is_alive()
    gate.go_on.set()
    importer.join(30)
    looker.join(30)
    assert not was_waiting


def test_a_hook_that_asks_all_others_is_not_asked_for_ever(modules, monkeypatch):
    name, another = modules.write(TARGET), modules.write("")
    asked = []

    class AsksTheOthers:
        def find_spec(self, name, path=None, target=None):
            asked.append(name)
            for finder in sys.meta_path:
                if finder is not self and (spec := finder.find_spec(name, path, target)):
                    return spec
            return None

    make_engine(make_patch(name)).activate()
    monkeypatch.setattr(sys, "meta_path", [AsksTheOthers(), *sys.meta_path])
    importlib.import_module(another)
    assert importlib.import_module(name).greet("you") == "hello you!"
    assert asked.count(another) <= 2  # by the import system, and by ours; not without end


def test_it_finds_nothing_while_it_stands_in_front(modules):
    """Each import would cost a second search otherwise."""
    make_engine(make_patch(modules.write(TARGET))).activate()
    assert sys.meta_path[0] is front_finder
    assert front_finder.find_spec(modules.write("")) is None


def test_a_module_of_ours_begins_no_late_look():
    """The look imports some, and holds locks meanwhile."""
    finder, looks = type(front_finder)(), []
    finder.on_missed, finder._may_have_missed = lambda: looks.append("look"), True
    for name, looked in {"megapatch.patches.late": 0, "another": 1, "later": 1}.items():
        finder.note_loaded(name, types.ModuleType(name))
        assert len(looks) == looked


def test_before_activation_nothing_is_missed(monkeypatch):
    monkeypatch.setitem(sys.modules, name := "megapatch_test_by_hand", types.ModuleType(name))
    engine = make_engine(make_patch(name))
    assert status_of(engine) == "pending"


# ------------------------------------------------------------------------ odd things in sys.modules
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


def test_a_patch_waits_if_one_of_its_modules_can_be_imported(modules):
    found = []
    for names in ((modules.write(TARGET), "nowhere_a"), ("nowhere_a", "nowhere_b")):
        info = PatchInfo("test.louder", "", None, names)
        waiting = Unloaded(info.name, "test", (info,), tuple, names_are_known=True)
        found.append(status_of(Engine((), Settings(quiet_value="1"), (waiting,))))
    assert found == ["pending", "not-installed"]
