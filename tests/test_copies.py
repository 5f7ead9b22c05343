"""Two copies of megapatch in one process: the later one stays off and says so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rigs.command import run

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
    os.symlink(HERE, folder / "vendor" / "megapatch")
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
    assert told.startswith(f"megapatch was loaded twice: the copy in {HERE} stays, this one is off (see ")
