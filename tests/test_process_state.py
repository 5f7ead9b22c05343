"""docs/process-state.csv has what outlives a model in the Megatron that is installed; each form of it is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from process_state.scan import Entry, scan
from process_state.table import FILE, HARMS, PACKAGES, VERDICTS, news, read, row_of

from megapatch._python.finding import find_module
from megapatch.patches import PATCHES

ROWS = read(FILE.read_text())
STATE = """
import os, functools
from functools import lru_cache, partial

import torch
from . import other
from .other import SHARED, make

_flag = False
_log: dict = {}
TABLE = {"constant": 1}
_kept = []

class Counter:
    made = 0
    known = {}
    own = []

    def __init__(self):
        self.own = []
        self.own.append(1)
        type(self).made += 1

    def note(self, key):
        self.known[key] = self.count = key

    @classmethod
    def first(cls):
        cls.instance = cls()

    @lru_cache(maxsize=4)
    def answer(self, size): ...

counter = Counter()
cached = functools.cache(max)

def get_log():
    return _log

def write(args, value):
    global _flag
    _flag = value
    get_log()["a"] = value
    kept = _kept
    kept.append(value)
    local = {}
    local["a"] = TABLE["constant"]
    write.calls = 1
    args.step = value
    other.setting = value
    SHARED.add(value)
    make().kept = value
    torch.backends.cudnn.benchmark = True
    setattr(Counter, "name", value)
    os.environ["PORT"] = "1"
    os.environ.setdefault(value, "2")
"""
OTHER = """
SHARED = set()
setting = None
_made = object()

def make():
    return _made
"""
OBJECT = """
class Actor:
    def load_other(self, path):
        self.args.load = path
        self.args = self.path = path
"""
STATES = """
    * environment, Counter.answer cache, Counter.instance class attribute, Counter.known class attribute,
    Counter.made class attribute, Counter.name class attribute, PORT environment, _flag global, _kept container,
    _log container, args.step argument, cached cache, counter object, torch.backends.cudnn.benchmark foreign,
    write.calls function attribute
"""
EXPECTED = {("package.state", *state.split(maxsplit=1)) for state in " ".join(STATES.split()).split(", ")}
EXPECTED |= {("package.other", "SHARED", "container"), ("package.other", "_made", "global")}
EXPECTED |= {("package.other", "setting", "global"), ("package.rank", "args.load", "argument")}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "package").mkdir()
    for name, text in {"__init__": "", "state": STATE, "other": OTHER, "rank": OBJECT}.items():
        (tmp_path / "package" / f"{name}.py").write_text(text)
    return tmp_path


def test_each_form_is_found_and_nothing_else(folder):
    found = {entry[:3]: entry for entry in scan(folder, ["package"])}
    assert set(found) == EXPECTED
    assert found["package.other", "SHARED", "container"].writers == ("package.state.write",)
    line = found["package.state", "_flag", "global"].line
    assert STATE.splitlines()[line - 1] == "_flag = False"
    assert scan(folder, ["package.other", "package.gone"]) == []  # read alone, nothing writes it


def test_what_is_new_or_gone_is_said(folder, monkeypatch):
    monkeypatch.setitem(PACKAGES, "ours", ("package",))
    row = ROWS[0]._replace(project="ours", module="package.*", name="*", kind="", releases="1.0 on")
    assert news("ours", [folder], [row]) == []
    said = news("ours", [folder], [row._replace(kind="cache"), row._replace(name="old", kind="")])
    assert len(said) == len(EXPECTED) - 2 + 1  # without the caches, with the row
    assert said[-1] == "gone: package.* old"
    assert re.fullmatch(r"new: package\.other SHARED \(container, line 2\): package\.state\.write", said[0])


def test_the_longest_row_counts():
    exact = ROWS[0]._replace(project="ours", module="package.state", name="_flag", kind="")
    rows = [exact._replace(name="*"), exact, exact._replace(module="package.*")]
    assert row_of("ours", Entry("package.state", "_flag", "global"), rows) == exact
    assert row_of("ours", Entry("package.state", "_other", "global"), rows) == rows[0]
    assert row_of("ours", Entry("elsewhere", "_flag", "global"), rows) is None


def test_rows():
    patches = {patch.name for patch in PATCHES}
    assert sorted(ROWS, key=lambda row: (HARMS.index(row.harm), VERDICTS.index(row.verdict))) == ROWS
    assert len({row[:4] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.project in PACKAGES, row
        assert re.fullmatch(r"\S+ (on|to \S+)", row.releases), row
        assert row.reason or row.verdict == "harmless", row
        assert (row.harm == "none") >= (row.verdict == "harmless"), row
        named = set(re.findall(r"\b[a-z_]+\.[a-z]+(?:-[a-z]+)+\b", f"{row.reason} {row.reset_by}"))
        assert named <= patches, row
        assert named or row.verdict != "repaired", row


def test_megatron_has_no_entry_that_the_file_lacks():
    core = find_module("megatron.core")
    if core is None:
        pytest.skip("megatron-core is not installed")
    folder = Path(core.origin).parent.parent.parent
    said = [line for line in news("megatron-core", [folder], ROWS) if line.startswith("new")]
    assert said == []
