"""Random sequences of what programs do with modules and patches: a target is replaced once or not at all, a site
goes in whole or not at all, and the report tells the truth."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import types

import pytest
import wrapt
from rigs.engine import TARGET, activated, make_engine, make_patch

from megapatch import RestoreError, _versions
from megapatch._engine.restoring import matching_names
from megapatch._python import loaded_modules
from megapatch._python.dotted import find
from megapatch._reporting.report import make_report

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import settings, strategies  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule  # noqa: E402

BASE = "class Base:\n    def greet(self, name):\n        return 'hello ' + name\n"
SOURCE = TARGET + "\nfrom {base} import Base\nalias = greet\ndef polite(name):\n    return 'hello ' + name\n"
OWN = ("greet", "Greeter.greet")  # one patch's targets; the other has one that a reload does not replace
OTHERS = ("Base.greet", "polite")
FOREIGN = strategies.sampled_from(["plain function", "functools.wraps", "wrapt"])
AT_ONCE = strategies.permutations(["apply", "activate", "import", "report"])


def foreign(kind, below):
    def shout(*args):
        return below(*args) + "?"

    if kind == "wrapt":
        return wrapt.FunctionWrapper(below, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs) + "?")
    return functools.wraps(below)(shout) if kind == "functools.wraps" else shout


def at(module, path):
    owners, _, name = path.rpartition(".")
    return find(module, owners), name


class Programs(RuleBasedStateMachine):
    """A target module, others that hold its function by name, foreign patches, and two patches of ours."""

    modules = None  # the fixture: their names are used once

    def __init__(self):
        super().__init__()
        self.base = self.modules.write(BASE, stem="base")
        self.name = self.modules.write(SOURCE.format(base=self.base))
        self.engine = make_engine(
            make_patch(self.name, *OWN, name="test.own"), make_patch(self.name, *OTHERS, name="test.others")
        )
        self.base_greet = vars(importlib.import_module(self.base).Base)["greet"]
        self.foreign = []  # path, parent, what stood there before
        self.meddled = False  # whether there ever was one: taken off late, it takes ours along
        self.loaded = {}  # what each target was when its module, by now perhaps not the last one, was loaded
        self.holders = []
        self.fresh_holders = []  # of the code that is loaded now
        self.touched = set()  # targets to which a foreign patch has given back what it found, perhaps long ago

    def target(self):
        return sys.modules.get(self.name)

    def remember(self):
        """A module has just been loaded: what its functions are without us."""
        for path in (*OWN, "polite"):
            parent, attribute = at(self.target(), path)
            found = vars(parent)[attribute]
            self.loaded[path] = getattr(found, "__wrapped__", found)
        self.fresh_holders, self.touched = [], set()

    # ------------------------------------------------------------------------------------------ what programs do
    @rule()
    def imports(self):
        new = self.target() is None
        importlib.import_module(self.name)
        if new:
            self.remember()

    @precondition(target)
    @rule()
    def reloads(self):
        importlib.reload(self.target())
        self.remember()

    @precondition(target)
    @rule()
    def forgets(self):
        del sys.modules[self.name]

    @precondition(target)
    @rule()
    def holds_by_name(self):
        holder = importlib.import_module(self.modules.write(f"from {self.name} import greet\n", stem="holder"))
        self.holders.append(holder)
        if not self.foreign:  # else it may hold that
            self.fresh_holders.append(holder)

    @precondition(target)
    @rule(kind=FOREIGN, path=strategies.sampled_from([*OWN, "polite"]))
    def patches_on_top(self, kind, path):
        parent, attribute = at(self.target(), path)
        before = vars(parent)[attribute]
        # Not over what has been given back: below a plain function nobody could see that it was ours.
        if path not in self.touched and not any(one[0] == path for one in self.foreign):
            self.foreign.append((path, parent, before))
            self.meddled = True
            setattr(parent, attribute, foreign(kind, before))

    @precondition(lambda self: self.foreign)
    @rule()
    def takes_its_own_off(self):
        path, parent, before = self.foreign.pop()
        setattr(parent, path.rpartition(".")[2], before)
        self.touched.add(path)

    # ------------------------------------------------------------------------------------------ what we do
    @rule()
    def activate(self):
        self.engine.activate()

    @rule()
    def apply(self):
        self.engine.apply()
        for record in self.engine.records:
            record.refresh()
            assert self.target() is None or record.status.value in ("applied", "overwritten"), record.reason
            own = record is self.engine.records[0]
            if own and self.target() and record.status.value == "applied" and not (self.foreign or self.touched):
                assert all(holder.greet is self.target().greet for holder in self.fresh_holders)

    @rule(names=strategies.sampled_from([(), ("test.own",), ("test.others",)]))
    def restore(self, names):
        before = self.everything()
        try:
            self.engine.restore(*names)
        except RestoreError:
            assert self.everything() == before
            assert self.meddled
            return
        if "test.own" in matching_names(self.engine.roster, names or "*"):
            self.is_as_it_was(*OWN)
            said = [holder.greet("you") for holder in self.holders]
            assert not any("!" in text and "?" not in text for text in said)
        if "test.others" in matching_names(self.engine.roster, names or "*"):
            self.is_as_it_was("polite")
            assert vars(sys.modules[self.base].Base)["greet"] is self.base_greet

    @rule(threads=strategies.integers(2, 4), actions=AT_ONCE)
    def all_at_once(self, threads, actions):
        new = self.target() is None
        deeds = {
            "apply": self.engine.apply,
            "activate": self.engine.activate,
            "import": lambda: importlib.import_module(self.name),
            "report": lambda: make_report(self.engine.records),
        }
        running = [threading.Thread(target=deeds[action]) for action in actions[:threads]]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(30)
            assert not thread.is_alive()
        if new and self.target() is not None:
            self.remember()

    # ------------------------------------------------------------------------------------------ what always holds
    def everything(self):
        target = self.target()
        return [vars(at(target, path)[0])[path.rpartition(".")[2]] for path in (*OWN, *OTHERS) if target] + [
            holder.greet for holder in self.holders
        ]

    def is_as_it_was(self, *paths):
        touched = self.touched | {path for path, _, _ in self.foreign}
        for path in paths:
            if self.target() and path not in touched:
                parent, attribute = at(self.target(), path)
                assert vars(parent)[attribute] is self.loaded[path]

    @invariant()
    def never_twice(self):
        target = self.target()
        said = [holder.greet("you") for holder in self.holders]
        if target:
            said += [target.greet("you"), target.alias("you"), target.polite("you")]
            said += [target.Greeter().greet("you"), target.Base().greet("you")]
        assert all(text.count("!") <= 1 for text in said), said

    @invariant()
    def the_report_tells_the_truth(self):
        shown = make_report(self.engine.records)
        assert shown.digest == make_report(self.engine.records).digest
        for one, record in zip(shown.patches, self.engine.records, strict=True):
            status, in_place = one.status.value, [target.partition(":")[2] for target in one.sites[0].targets]
            assert status in ("applied", "pending", "missed", "disabled", "overwritten"), one.reason
            assert status != "missed" or self.target()
            if status == "applied":
                assert sorted(in_place) == sorted(record.site.paths)
                for path in record.site.paths if self.target() else ():
                    function = getattr(*at(self.target(), path))
                    assert function(*[None] * ("." in path), "you").replace("?", "") == "hello you!"
            elif status != "overwritten":
                assert not in_place
            assert status != "overwritten" or len(in_place) < len(record.site.paths)

    def teardown(self):
        for name in self.modules.names:
            sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def _few_modules(monkeypatch, modules):
    """No sweep over all modules of the test run, for each of thousands of steps."""

    class Ours(dict):
        def items(self):
            return [
                (name, module)
                for name, module in sys.modules.items()
                if name.startswith(("target_", "base_", "holder_"))
            ]

    monkeypatch.setattr(loaded_modules, "sys", types.SimpleNamespace(modules=Ours()))
    monkeypatch.setattr(sys.modules["megapatch._reporting.report"], "left_behind", lambda installed: {})  # as slow
    monkeypatch.setattr(_versions, "here", dict)
    monkeypatch.setattr(Programs, "modules", modules)


def test_whatever_happens_in_whatever_order():
    hypothesis.stateful.run_state_machine_as_test(
        Programs,
        settings=settings(
            deadline=None,
            database=None,
            derandomize="MEGAPATCH_EXAMPLES" not in os.environ,
            max_examples=int(os.environ.get("MEGAPATCH_EXAMPLES", "60")),
            stateful_step_count=20,
        ),
    )


def test_a_foreign_patch_that_is_taken_off_below_ours_is_no_reload(modules):
    target = importlib.import_module(name := modules.write(TARGET))
    before = target.greet
    target.greet = foreign("plain function", before)
    engine = activated(make_patch(name, *OWN))
    target.greet = before
    (site,) = make_report(engine.records).patches[0].sites
    assert (site.status.value, site.targets) == ("overwritten", (f"{name}:Greeter.greet",))
