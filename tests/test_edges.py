"""Other people's failures: signals while a patch is looked at, bad metadata; and two copies of megapatch."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from rigs.command import run
from rigs.engine import TARGET, make_engine, make_patch, needed, status_of

import megapatch
from megapatch._engine import complaints

PACKAGE = Path(megapatch.__file__).parent
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends itself signals")


# ------------------------------------------------------------------------------------------ signals
def leave_for_good(number, frame):
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(143)


@pytest.mark.parametrize(("handler", "raised"), [(leave_for_good, SystemExit), (None, KeyboardInterrupt)])
@pytest.mark.parametrize("where", ["diagnosis", "factory", "entry point"])
def test_what_comes_from_outside_is_not_the_patchs(where, handler, raised, modules, monkeypatch):
    """Slurm ends a job while Megatron is imported; a caller that survives that gets the patch afterwards."""
    number = signal.SIGTERM if handler else signal.SIGINT
    before = signal.signal(number, handler or signal.default_int_handler)
    once = [number]

    def interrupted():
        if once:
            os.kill(os.getpid(), once.pop())
            for _ in range(1000):  # until it is delivered
                pass

    def diagnose(module):
        if where == "diagnosis":
            interrupted()
        return needed(module)

    def factory(greet):
        if where == "factory":
            interrupted()
        return lambda *args: greet(*args) + "!"

    name = modules.write(TARGET)
    engine = make_engine(make_patch(name, diagnose=diagnose, factory=factory))
    if where == "entry point":
        from megapatch._engine.engine import Engine
        from megapatch._engine.record import Unloaded
        from megapatch._engine.settings import Settings
        from megapatch.patch import PatchInfo

        def load():
            interrupted()
            return (make_patch(name),)

        info = PatchInfo("third_party.other", "Patches of another.", None, (name,))
        engine = Engine((), Settings(), [Unloaded(info.name, name, (info,), load, names_are_known=False)])
    engine.activate()
    try:
        with pytest.raises(raised):
            importlib.import_module(name)
    finally:
        signal.signal(number, before)
    assert status_of(engine) != "failed"
    engine.apply()
    assert importlib.import_module(name).greet("you") == "hello you!"
    assert status_of(engine) == "applied"


# ------------------------------------------------------------------------------------------ metadata
def distribution(folder, name, entry_points, metadata=None):
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    text = metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
    (info / "METADATA").write_bytes(text)
    (info / "entry_points.txt").write_bytes(entry_points)


def found(**environment):
    code = (
        "import logging; logging.basicConfig()\n"
        "import megapatch\n"
        "print([patch.patch.name for patch in megapatch.report().patches if 'third' in patch.patch.name])"
    )
    done = run("-c", code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_distribution_with_bad_metadata_loses_no_other(tmp_path):
    good = b"[megapatch.patches]\ntarget = good:PATCH\n"
    distribution(tmp_path, "abad", b"[megapatch.patches]\n\xff\xfe = 1\n")
    distribution(tmp_path, "good", good)
    distribution(tmp_path, "zbad", b"[megapatch.patches\nnonsense", metadata=b"\xff\xfe\x00")
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    names, said = found(PYTHONPATH=path)
    assert "third_party.good" in names
    assert "abad-1.0.dist-info" in said


# ------------------------------------------------------------------------------------------ misspelt variables
@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("MEGAPATCH_DISABLED", "MEGAPATCH_DISABLE"),
        ("megapatch_only", "MEGAPATCH_ONLY"),
        ("MEGAPATCHSTRICT", "MEGAPATCH_STRICT"),
        ("MEGAPATH_DISABLE", "MEGAPATCH_DISABLE"),
        ("MEGA_PATCH_STRICT", "MEGAPATCH_STRICT"),
    ],
)
def test_a_misspelt_variable_is_a_warning_at_import(variable, meant):
    _, said = found(**{variable: "megatron.*"})
    assert f"{variable} is set and means nothing to megapatch; did you mean {meant}?" in said
    assert "megatron.*" not in said


@pytest.mark.parametrize("variable", ["MEGATRON_STRICT", "MEDIA_ONLY", "PIP_QUIET", "MEGAPHONE_AUDIT"])
def test_those_of_others_are_not(variable):
    _, said = found(**{variable: "1"})
    assert "means nothing" not in said


def test_the_known_ones_are_not():
    environment = {"MEGAPATCH_RUN_TARGETS": "", "MEGAPATCH_AUDIT": "0", "MEGAPATCH_AUDIT_EVERY": "5"}
    assert found(**environment)[1] == ""


@pytest.mark.parametrize(
    ("line", "is_doctor"),
    [
        ("/usr/bin/megapatch doctor --report", True),
        ("-m doctor < python -m megapatch doctor", True),
        ("-m doctor < python -m train doctor", False),
        ("train.py doctor", False),
        ("train.py doctor < python train.py doctor -m megapatch", False),
        ("megapatch audit doctor", False),
        ("megapatch", False),
    ],
)
def test_doctor_says_itself_what_is_wrong_with_a_variable(monkeypatch, caplog, line, is_doctor):
    at_first, _, began_with = line.partition(" < ")
    monkeypatch.setattr(sys, "argv", at_first.split())
    monkeypatch.setattr(sys, "orig_argv", (began_with or f"python {line}").split())
    complaints.warn_of_a_setting("it is misspelt")
    assert bool(caplog.text) != is_doctor


# ------------------------------------------------------------------------ two copies
PURGED = """
for name in [name for name in sys.modules if name.partition(".")[0] == "megapatch"]:
    del sys.modules[name]
second = "megapatch"
"""
VENDORED = 'second = "vendor.megapatch"'
SCRIPT = """
import functools, importlib, json, logging, sys
import target

told = []
class Handler(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING:
            told.append(record.getMessage())
logging.getLogger("megapatch").addHandler(Handler())

def louder(greet):
    @functools.wraps(greet)
    def patched_greet(*args):
        return greet(*args) + "!"
    return patched_greet

import megapatch as first
from megapatch._engine.engine import this_process
needed = lambda module: first.Verdict(first.NEEDED, "it is too quiet")
site = first.Site(module="target", diagnose=needed, replace={{"greet": louder}})
patch = first.Patch("test.louder", "Greetings are loud.", None, (site,))
roster = this_process().roster
roster.records += roster._records_of(patch, roster.records)
first.apply()
{between}
other = importlib.import_module(second)
assert other is not first
other.apply()
records = importlib.import_module(f"{{second}}._engine.engine").this_process().records
importlib.reload(target)
first.apply()
found = {{"said": target.greet("you"), "first": roster.records[-1].status.value, "told": told}}
found["other"] = list({{(record.status.value, record.reason) for record in records}})
found["finders"] = sum(type(finder).__name__ == "_FrontFinder" for finder in sys.meta_path)
first.restore()
found["restored"] = target.greet("you")
print(json.dumps(found))
sys.modules["torch"] = sys.modules["megatron.core"] = target  # a copy that did nothing would say so
"""


def ran(folder, between):
    (folder / "vendor").mkdir()
    (folder / "vendor" / "__init__.py").touch()
    os.symlink(PACKAGE, folder / "vendor" / "megapatch")
    (folder / "target.py").write_text("def greet(name):\n    return 'hello ' + name\n")
    done = run("-c", SCRIPT.format(between=between), path=folder)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "signs": done.stderr}


@pytest.mark.parametrize("between", [PURGED, VENDORED], ids=["purged", "vendored"])
def test_the_later_copy_stays_off(between, tmp_path):
    found = ran(tmp_path, between)
    assert (found["said"], found["first"], found["restored"]) == ("hello you!", "applied", "hello you")
    assert found["other"] == [["disabled", "another copy of megapatch is active in this process"]]
    assert found["finders"] == 1
    assert "applied no patch" not in found["signs"]
    (told,) = found["told"]
    assert told.startswith(f"megapatch was loaded twice: the copy in {PACKAGE} stays, this one is off (see ")
