"""Activation before, during and after the import; applying often; what goes wrong stays inside."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
import types

import pytest
from rigs.engine import TARGET, activated, make_engine, make_patch, status_of

from megapatch._engine import holders
from megapatch._engine.engine import Engine
from megapatch._engine.record import Unloaded
from megapatch._engine.settings import Settings
from megapatch.patch import ABSENT, FIXED, UNKNOWN, UNSUPPORTED, PatchInfo, Verdict


def test_activation_while_another_thread_imports(modules):
    gate = types.ModuleType("gate")
    gate.reached, gate.go_on = threading.Event(), threading.Event()
    sys.modules["megapatch_test_gate"] = gate
    name = modules.write(
        "import megapatch_test_gate as gate\ngate.reached.set()\nassert gate.go_on.wait(10)\n" + TARGET
    )
    importer = threading.Thread(target=importlib.import_module, args=(name,))
    importer.start()
    assert gate.reached.wait(10)
    engine = make_engine(make_patch(name))
    activator = threading.Thread(target=engine.activate)
    activator.start()
    activator.join(0.2)
    assert activator.is_alive()  # it waits for the other thread rather than patch half a module
    gate.go_on.set()
    importer.join(10)
    activator.join(10)
    assert sys.modules[name].greet("you") == "hello you!"
    assert status_of(engine) == "applied"


@pytest.mark.parametrize("finish", ["next event", "apply"])
def test_activation_in_the_middle_of_the_import_in_our_own_thread(modules, finish):
    caller = types.ModuleType("caller")
    sys.modules["megapatch_test_caller"] = caller
    name = modules.write("import megapatch_test_caller as c; c.engine.activate(); c.seen = c.status()\n" + TARGET)
    other = modules.write(TARGET, stem="other")
    engine = caller.engine = make_engine(make_patch(name), make_patch(other, name="test.other"))
    caller.status = lambda: status_of(engine)
    target = importlib.import_module(name)
    assert caller.seen == "pending"
    assert target.greet("you") == "hello you"
    if finish == "apply":
        engine.apply()
    else:
        importlib.import_module(other)
    assert target.greet("you") == "hello you!"


def test_an_import_that_fails_at_first_is_patched_when_it_succeeds(modules):
    name = modules.write("raise RuntimeError('no GPU')")
    activated(make_patch(name))
    with pytest.raises(RuntimeError, match="no GPU"):
        importlib.import_module(name)
    (modules.folder / f"{name}.py").write_text(TARGET)
    importlib.invalidate_caches()
    assert importlib.import_module(name).greet("you") == "hello you!"


def test_a_thousand_calls_from_64_threads_change_a_target_once(modules):
    name = modules.write(TARGET + "alias = greet\n")
    engine = make_engine(make_patch(name, "greet", "Greeter.greet"))
    threads = [
        threading.Thread(target=lambda: [engine.activate() or engine.apply() for _ in range(1000 // 64 + 1)])
        for _ in range(64)
    ]
    threads.append(threading.Thread(target=importlib.import_module, args=(name,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    target = sys.modules[name]
    assert target.greet("you") == target.alias("you") == target.Greeter().greet("you") == "hello you!"
    assert status_of(engine) == "applied"


def test_restoring_and_applying_at_once_leaves_all_or_nothing(modules):
    target = importlib.import_module(name := modules.write(TARGET + "alias = greet\n"))
    user = importlib.import_module(modules.write(f"from {name} import greet\n", stem="user"))
    engine = activated(make_patch(name, "greet", "Greeter.greet"))

    def change():
        for _ in range(30):
            engine.restore()
            engine.apply()

    threads = [threading.Thread(target=change) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    engine.apply()
    assert target.greet is target.alias is user.greet
    assert target.greet("you") == target.Greeter().greet("you") == "hello you!"
    engine.restore()
    assert target.greet("you") == target.alias("you") == user.greet("you") == "hello you"


def test_what_was_installed_during_a_search_has_a_search_of_its_own(modules, monkeypatch):
    target = importlib.import_module(name := modules.write(TARGET + "alias = greet\n"))
    engine = make_engine(make_patch(name))
    find = holders.find
    searching, searched = threading.Event(), threading.Event()
    other = threading.Thread(target=engine.apply)

    def search_too_early(*args):
        monkeypatch.setattr(holders, "find", find)
        engine.restore()
        monkeypatch.setattr(holders, "find", search_late)
        other.start()
        assert searching.wait(60)
        return {}  # as while yet another one had given its replacement to all

    def search_late(*args):
        searching.set()
        assert searched.wait(60)
        return find(*args)

    monkeypatch.setattr(holders, "find", search_too_early)
    original = target.greet
    engine.activate()
    searched.set()
    other.join(60)
    assert target.alias is target.greet is not original


def test_reloaded_code_is_told_from_what_others_put_around_the_old(modules):
    source = "import contextlib\n@contextlib.contextmanager\ndef greet():\n    yield\n"
    target = importlib.import_module(name := modules.write(source))
    original = target.greet
    engine = activated(make_patch(name))
    target.greet = functools.wraps(original)(lambda: original())
    assert status_of(engine) == "overwritten"
    importlib.reload(target)
    assert status_of(engine) == "missed"
    engine.apply()
    assert status_of(engine) == "applied"


def test_an_inherited_target_is_patched_again_where_its_class_was_reloaded(modules):
    base = importlib.import_module(modules.write(TARGET, stem="base"))
    name = modules.write(f"from {base.__name__} import Greeter\nclass Polite(Greeter): ...\n")
    target = importlib.import_module(name)
    engine = activated(make_patch(name, "Polite.greet"))
    del target.Polite.greet
    assert status_of(engine) == "overwritten"
    importlib.reload(target)
    assert status_of(engine) == "missed"
    engine.apply()
    assert target.Polite().greet("you") == "hello you!"
    assert base.Greeter().greet("you") == "hello you"


@pytest.mark.parametrize(
    ("kind", "status"),
    [(FIXED, "not-needed"), (ABSENT, "not-needed"), (UNSUPPORTED, "unsupported"), (UNKNOWN, "refused")],
)
def test_a_verdict_other_than_needed_leaves_the_target_alone(modules, caplog, kind, status):
    target = importlib.import_module(name := modules.write(TARGET))
    before = target.greet
    engine = activated(make_patch(name, diagnose=lambda module: Verdict(kind, "as it happens")))
    engine.apply()
    assert target.greet is before
    assert (status_of(engine), engine.records[0].reason) == (status, "as it happens")
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (status == "refused")  # said once, however often it is applied
    assert all("test.louder" in text and "as it happens" in text for text in warnings)


def _raise(*ignored):
    raise ZeroDivisionError("a bug of ours")


@pytest.mark.parametrize(
    ("bug", "reason"),
    [
        ({"diagnose": _raise}, "ZeroDivisionError: a bug of ours"),
        ({"diagnose": lambda module: "yes"}, "not a Verdict"),
        ({"factory": _raise}, "ZeroDivisionError: a bug of ours"),
        ({"factory": lambda original: type("Proxy", (), {"__call__": original})()}, "not a plain function"),
    ],
)
def test_a_bug_in_a_patch_does_not_break_the_import(modules, caplog, bug, reason):
    name = modules.write(TARGET)
    engine = activated(make_patch(name, **bug))
    target = importlib.import_module(name)
    assert target.greet("you") == "hello you"
    assert status_of(engine) == "failed"
    assert reason in engine.records[0].reason
    assert "Traceback" in engine.records[0].traceback
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "test.louder" in warning.getMessage() and "Traceback" in warning.getMessage()


def test_switched_off(modules, caplog):
    name = modules.write(TARGET)
    engine = activated(make_patch(name), disable=("test.loud*",))
    assert importlib.import_module(name).greet("you") == "hello you"
    assert status_of(engine) == "disabled"
    assert engine.records[0].reason == "switched off by MEGAPATCH_DISABLE=test.loud*"
    engine.restore()
    engine.apply()
    assert status_of(engine) == "disabled"


def test_only_patches_that_keep_numbers(modules):
    """With one that changes them by its name; the settings hear of the property as a patch is loaded."""
    name = modules.write(TARGET)
    kept, named, changing = (
        make_patch(name, path, name=f"test.{number}", changes_numbers=number > 0)
        for number, path in enumerate(("greet", "Greeter.greet", "Greeter.__init__"))
    )
    info = PatchInfo(changing.name, "not loaded", None, changing.modules)
    unloaded = Unloaded(info.name, "test", (info,), lambda: (changing,), names_are_known=True)
    settings = Settings(only=("@same-numbers", named.name), quiet_value="1")
    engine = Engine((kept, named), settings, (unloaded,))
    engine.activate()
    importlib.import_module(name)
    assert [status_of(engine, number) for number in range(3)] == ["applied", "applied", "disabled"]
    assert engine.records[2].reason == f"not named by MEGAPATCH_ONLY=@same-numbers,{named.name}"
    engine.restore("@same-numbers")
    assert [status_of(engine, number) for number in range(2)] == ["disabled", "applied"]


def test_an_unknown_name_in_the_environment_is_said_with_what_was_meant(caplog):
    make_engine(make_patch("nowhere"), disable=("test.lauder",)).activate()
    assert "MEGAPATCH_DISABLE: no patch is called 'test.lauder'; did you mean test.louder?" in caplog.text


def test_a_method_that_is_deleted_gives_way_to_an_inherited_one_that_apply_patches(modules):
    source = TARGET + "class Heir(Greeter):\n    def greet(self, name):\n        return 'good day ' + name\n"
    target = importlib.import_module(name := modules.write(source))
    engine = activated(make_patch(name, "Heir.greet"))
    assert target.Heir().greet("you") == "good day you!"
    del target.Heir.greet
    assert status_of(engine) == "missed"
    engine.apply()
    assert target.Heir().greet("you") == "hello you!"
    assert target.Greeter().greet("you") == "hello you"
