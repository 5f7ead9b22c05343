"""All targets of a site or none, other holders by name, and back again."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle

import pytest
from rigs.engine import TARGET, activated, make_engine, make_patch, status_of

from megapatch import MegapatchError, RestoreError, _versions
from megapatch._engine import restoring
from megapatch._engine.record import Unloaded
from megapatch._python.dotted import find
from megapatch._reporting.report import make_report
from megapatch.patch import FIXED, UNKNOWN, PatchInfo, Verdict

TRACER = """
import functools

def traced(function):
    @functools.wraps(function)
    def trace(*args):
        return function(*args)
    return trace
"""


def test_a_site_goes_in_whole_or_not_at_all_when_a_target_is_missing(modules):
    target = importlib.import_module(name := modules.write(TARGET))
    before = target.greet
    engine = activated(make_patch(name, "greet", "Greeter.whisper"))
    assert target.greet is before
    assert status_of(engine) == "failed"
    assert "whisper" in engine.records[0].reason


def test_a_site_goes_in_whole_or_not_at_all_when_a_target_cannot_be_set(modules):
    source = (
        TARGET
        + """
class Meta(type):
    def __setattr__(cls, name, value):
        raise TypeError("sealed")

class Sealed(metaclass=Meta):
    def greet(self, name):
        return name
"""
    )
    target = importlib.import_module(name := modules.write(source))
    before = dict(vars(target)), dict(vars(target.Greeter))
    engine = activated(make_patch(name, "greet", "Greeter.greet", "Sealed.greet"))
    assert (dict(vars(target)), dict(vars(target.Greeter))) == before
    assert engine.records[0].reason == "TypeError: sealed"


def test_a_function_may_have_the_name_of_the_submodule_that_its_package_has_it_from(tmp_path, monkeypatch):
    (package := tmp_path / "shadowed").mkdir()
    (package / "greet.py").write_text(TARGET)
    (package / "__init__.py").write_text("from .greet import greet")
    monkeypatch.syspath_prepend(tmp_path)
    target = importlib.import_module("shadowed")
    engine = activated(make_patch("shadowed", "greet"))
    assert (status_of(engine), target.greet("you")) == ("applied", "hello you!")
    assert find(target, "greet") is target.greet
    assert find(target, "greet.__name__") == "greet"


def test_what_is_installed_is_a_plain_function_that_pickles_copies_and_shows_its_signature(modules):
    target = importlib.import_module(name := modules.write(TARGET))
    signature, arguments = inspect.signature(target.greet), inspect.getfullargspec(target.greet)
    make_engine(make_patch(name, "greet", "Greeter.greet")).activate()
    for function in (target.greet, target.Greeter.greet):
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is function
        assert inspect.isfunction(function)
    assert inspect.signature(target.greet) == signature
    assert inspect.getfullargspec(target.greet) == arguments


def test_restore_gives_the_identical_original_everywhere(modules):
    name = modules.write(TARGET)
    target = importlib.import_module(name)
    functions = target.greet, target.Greeter.greet
    engine = activated(make_patch(name, "greet", "Greeter.greet"))
    late = importlib.import_module(modules.write(f"from {name} import greet\n", stem="late"))
    assert late.greet("you") == "hello you!"
    engine.restore("test.louder")
    assert (target.greet, target.Greeter.greet) == functions
    assert late.greet is functions[0]
    assert status_of(engine) == "disabled"
    engine.activate()  # a framework's init hook, say
    assert target.greet is functions[0]
    engine.apply()
    assert target.greet("you") == late.greet("you") == "hello you!"


def test_restore_deletes_what_was_inherited(modules):
    base = modules.write(TARGET, stem="base")
    name = modules.write(f"from {base} import Greeter\n\nclass Heir(Greeter):\n    pass\n")
    target = importlib.import_module(name)
    engine = activated(make_patch(name, "Heir.greet"))
    assert target.Heir().greet("you") == "hello you!" and target.Greeter().greet("you") == "hello you"
    assert pickle.loads(pickle.dumps(target.Heir.greet)) is target.Heir.greet
    engine.restore()
    assert "greet" not in vars(target.Heir)


def test_a_foreign_patch_on_top_is_seen_and_not_removed(modules, caplog):
    target = importlib.import_module(name := modules.write(TARGET))
    other = importlib.import_module(modules.write(TARGET))
    engine = activated(
        make_patch(name, "greet", "Greeter.greet"), make_patch(other.__name__, name="test.restored-first")
    )
    ours = target.Greeter.greet

    def foreign(self, name):
        return f"HELLO {name}"

    foreign.__module__, foreign.__qualname__ = "someone_else", "shout"
    target.Greeter.greet = foreign
    assert status_of(engine) == "overwritten"
    assert "someone_else.shout" in engine.records[0].reason
    with pytest.raises(RestoreError, match=r"Greeter\.greet cannot be restored: someone_else\.shout"):
        engine.restore()
    assert target.Greeter.greet is foreign and target.greet("you") == other.greet("you") == "hello you!"
    engine.apply()
    assert target.Greeter().greet("you") == "HELLO you"
    assert caplog.text.count("is overwritten") == 1
    target.Greeter.greet = ours
    assert status_of(engine) == "applied"


def test_a_wrapper_on_top_that_says_what_it_wraps_leaves_the_patch_applied(modules, caplog):
    target = importlib.import_module(name := modules.write(TARGET))
    tracer = importlib.import_module(modules.write(TRACER, stem="tracer"))
    engine = activated(make_patch(name, "greet", "Greeter.greet"), strict_value="1")
    target.greet = tracer.traced(target.greet)
    target.Greeter.greet = tracer.traced(tracer.traced(target.Greeter.greet))
    engine.apply()  # with MEGAPATCH_STRICT this raises for what is overwritten
    assert status_of(engine) == "applied" and "overwritten" not in caplog.text
    site = make_report(engine.records).patches[0].sites[0]
    assert site.targets == (f"{name}:greet", f"{name}:Greeter.greet")
    assert [text.split(" (")[0] for text in site.foreign] == [tracer.__name__] * 3
    with pytest.raises(RestoreError, match="was installed over megapatch's"):
        engine.restore()
    importlib.reload(target)
    engine.apply()
    assert target.greet("you") == "hello you!"


def test_restoring_an_unknown_name_is_an_error_that_helps():
    engine = make_engine(make_patch("nowhere"))
    with pytest.raises(MegapatchError, match=r"no patch is called 'test.laud'; did you mean test\.louder\?"):
        engine.restore("test.laud")
    with pytest.raises(MegapatchError, match=r"no patch is called 'test\.laud'"):
        restoring.matching_names(engine.roster, ["test.louder", "test.laud"])


def test_a_patch_that_is_not_loaded_may_change_numbers():
    engine, info = make_engine(make_patch("nowhere")), PatchInfo("test.unloaded", "", None, ("nowhere",))
    engine.roster.records += (Unloaded(info.name, "nowhere", (info,), tuple, names_are_known=True),)
    for selection, meant in {"@same-numbers": ["test.louder"], "*": ["test.louder", "test.unloaded"]}.items():
        assert restoring.matching_names(engine.roster, [selection]) == meant


def test_patches_on_one_target_are_restored_from_the_top_down(modules):
    target = importlib.import_module(name := modules.write(TARGET))
    original = target.greet
    engine = activated(make_patch(name, name="test.first"), make_patch(name, name="test.second"))
    assert target.greet("you") == "hello you!!"
    with pytest.raises(RestoreError, match=r"greet cannot be restored: the patch test\.second was installed over"):
        engine.restore("test.first")
    assert [status_of(engine, position) for position in (0, 1)] == ["applied", "applied"]
    engine.restore("test.second")
    assert target.greet("you") == "hello you!"
    engine.apply()
    assert target.greet("you") == "hello you!!"
    engine.restore()
    assert target.greet is original
    engine.apply()
    assert target.greet("you") == "hello you!!"


def test_what_is_installed_below_sees_what_the_others_leave(modules):
    target = importlib.import_module(name := modules.write(TARGET))
    importer = importlib.import_module(modules.write(f"from {name} import greet", stem="importer"))
    original, seen = target.greet, []

    def watched(greet):
        @functools.wraps(greet)
        def patched_greet(*args):
            seen.append(greet(*args))
            return seen[-1]

        return patched_greet

    engine = activated(make_patch(name))
    engine.restore("test.louder")
    engine.apply()
    watcher = make_patch(name, name="audit.greetings", factory=watched)
    engine.install_below([watcher])
    assert importer.greet("you") == target.greet("you") == "hello you!"
    assert seen == ["hello you"] * 2
    assert [status_of(engine, position) for position in (0, 1)] == ["applied", "applied"]
    assert not any(site.foreign for one in make_report(engine.records).patches for site in one.sites)
    engine.restore()
    assert target.greet("you") == importer.greet("you") == "hello you" and len(seen) == 4
    engine.apply()
    engine.install_below([])
    assert target.greet("you") == "hello you!" and len(seen) == 4
    assert [patch.name for patch in engine.patches] == ["test.louder"]
    engine.restore()
    assert target.greet is importer.greet is original


def test_what_is_installed_below_may_be_loaded_when_it_is_due(modules):
    name, loaded = modules.write(TARGET), []
    info = PatchInfo("audit.greetings", "", None, (name,))

    def load():
        loaded.append(make_patch(name, name=info.name, factory=lambda greet: lambda *args: greet(*args) + "?"))
        return loaded

    engine = activated(make_patch(name), disable=("audit.*",))
    engine.install_below([Unloaded(info.name, name, (info,), load, names_are_known=True)])
    assert not loaded
    target = importlib.import_module(name)
    assert len(loaded) == 1 and target.greet("you") == "hello you?!"
    engine.restore()
    assert target.greet("you") == "hello you?"
    engine.install_below([])
    assert target.greet("you") == "hello you" and [patch.name for patch in engine.patches] == ["test.louder"]


@pytest.mark.parametrize("names", [(), ("*",), ("test.louder", "*.[gl]*")])
def test_what_is_installed_below_stays_whatever_a_user_restores_or_disables(modules, names):
    target = importlib.import_module(name := modules.write(TARGET))
    engine = make_engine(make_patch(name), disable=("audit.*", "*.softer"))
    engine.install_below([make_patch(name, name="audit.greetings")])
    assert target.greet("you") == "hello you"  # nothing before that
    engine.activate()
    assert target.greet("you") == "hello you!!"
    engine.restore(*names)
    assert target.greet("you") == "hello you!"
    assert [status_of(engine, position) for position in (0, 1)] == ["applied", "disabled"]
    engine.apply()
    assert target.greet("you") == "hello you!!"
    with pytest.raises(MegapatchError, match="no patch is called 'audit"):
        engine.restore("audit.*")
    assert "no patch is called 'audit.*'" in engine.roster.complaints()[0]


def test_what_a_user_restored_stays_away_when_something_is_installed_below(modules):
    target = importlib.import_module(name := modules.write(TARGET))
    engine = activated(make_patch(name))
    engine.restore()
    engine.install_below(
        [make_patch(name, name="audit.greetings", factory=lambda greet: lambda *args: greet(*args))]
    )
    assert target.greet("you") == "hello you" and status_of(engine, 1) == "disabled"


def test_a_site_is_not_restored_under_what_others_have_put_on_top(modules):
    """The engine has asked before; in between another thread may have."""
    target = importlib.import_module(name := modules.write(TARGET))
    engine = activated(make_patch(name, "greet", "Greeter.greet"))
    ours, target.greet = target.Greeter.greet, print
    with pytest.raises(RestoreError, match="greet cannot be restored"):
        restoring.restore_one(engine.records[0], {})
    assert (target.greet, target.Greeter.greet) == (print, ours)


@pytest.mark.parametrize(("kind", "reason"), [(UNKNOWN, "it whispers (beta 1)"), (FIXED, "it whispers")])
def test_the_version_is_said_of_code_that_is_not_known(modules, monkeypatch, kind, reason):
    monkeypatch.setattr(_versions, "remark", lambda module: " (beta 1)")
    importlib.import_module(name := modules.write(TARGET))
    engine = activated(make_patch(name, diagnose=lambda module: Verdict(kind, "it whispers")))
    assert engine.records[0].reason == reason
