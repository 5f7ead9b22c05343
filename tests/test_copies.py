"""Two copies of megapatch in one process: the later one takes over, or stays off and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megapatch

HERE = Path(megapatch.__file__).parent
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

def patched_by(package):
    megapatch = importlib.import_module(package)
    engine = importlib.import_module(f"{{package}}._engine.engine").this_process()
    needed = lambda module: megapatch.Verdict(megapatch.NEEDED, "it is too quiet")
    site = megapatch.Site(module="target", diagnose=needed, replace={{"greet": louder}})
    patch = megapatch.Patch("test.louder", "Greetings are loud.", None, (site,))
    engine.roster.records += engine.roster._records_of(patch, engine.roster.records)
    engine.apply()
    return megapatch, engine.records[-1]

first, old = patched_by("megapatch")
{between}
other, new = patched_by(second)
assert other is not first
found = {{"said": target.greet("you"), "old": [old.status.value, old.reason], "new": new.status.value}}
found["told"] = told[:]
first.apply()
importlib.reload(target)
other.apply()
found["reloaded"] = target.greet("you")
found["finders"] = sum(type(finder).__name__ == "_FrontFinder" for finder in sys.meta_path)
other.restore()
found["restored"] = target.greet("you")
found["later"] = told[len(found["told"]):]
print(json.dumps(found))
"""


def ran(folder, between):
    (folder / "vendor").mkdir()
    (folder / "vendor" / "__init__.py").touch()
    os.symlink(HERE, folder / "vendor" / "megapatch")
    (folder / "target.py").write_text("def greet(name):\n    return 'hello ' + name\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(HERE.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(between=between)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("between", [PURGED, VENDORED], ids=["purged", "vendored"])
def test_the_later_copy_takes_over(between, tmp_path):
    found = ran(tmp_path, between)
    assert found["said"] == found["reloaded"] == "hello you!"
    assert found["restored"] == "hello you"
    assert found["old"] == ["disabled", "another copy of megapatch in this process has taken over"]
    assert found["new"] == "applied" and found["finders"] == 1
    (told,) = found["told"]
    assert "loaded twice: this copy takes over from the one in " in told
    assert found["later"] == []


@pytest.mark.parametrize("between", [PURGED, VENDORED], ids=["purged", "vendored"])
def test_a_copy_that_cannot_take_over_stays_off(between, tmp_path):
    """Someone has patched on top of the first copy, which cannot restore."""
    on_top = "below = target.greet\ntarget.greet = functools.wraps(below)(lambda *args: below(*args) + '?')\n"
    found = ran(tmp_path, on_top + between)
    assert found["said"] == "hello you!?"
    assert found["old"][0] == "applied"
    (told,) = found["told"]
    assert "cannot be restored (RestoreError: " in told and "this one stays off (see " in told
