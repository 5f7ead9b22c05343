"""An audit is one object: the next one begins with nothing, and no module keeps anything beside it."""

from __future__ import annotations

import importlib
import weakref
from collections import Counter
from pathlib import Path

import pytest
from rigs.audit import running_audit
from rigs.imported import run_with_megatron
from rigs.megatron.options import BOTH, UNPATCHED

import megapatch
from megapatch import audit
from megapatch.testing import init_parallel, tiny_gpt


# ------------------------------------------------------------------------ the next audit
def used_again(model, step):
    """Step on gradients that are added to those of the last step."""
    model.forward_backward(step)
    model.optimizer.step()


def read(model, step):
    """Read parameters that a step may have left to be gathered."""
    model.chunks[0].state_dict()


def read_too_early(model, step):
    model.train_step(step)
    read(model, step)


DEFECTS = {  # options, the defect, a sign of it that takes knowledge of the last step, and the rule
    "used again": ({}, used_again, used_again, "fresh-gradients"),
    "read too early": (BOTH, read_too_early, read, "gathered-when-read"),
}


def found():
    return {each.rule: (each.step, each.count) for each in (*audit.findings(), *audit.notes())}


def restarted(options, defect, sign, rule):
    audit.start(every=1)
    megapatch.restore("*")  # the audit stays
    model = tiny_gpt(**options)
    for step in range(3):
        defect(model, step)
    first = found()
    audit.stop()
    defect(model, 3)
    stopped = found()
    audit.start(every=1)
    begun = found()
    sign(model, 4)
    unknown = found()
    defect(model, 5)
    again = found()
    audit.stop()
    return first, stopped, begun, unknown, again


def job(rank, world_size):
    init_parallel()
    return {name: restarted(*defect) for name, defect in DEFECTS.items()}


@pytest.fixture(scope="module")
def ranks():
    return run_with_megatron(job, 2, env=UNPATCHED)


@pytest.mark.parametrize("name", DEFECTS)
def test_an_audit_knows_nothing_of_the_one_before_and_watches_the_same_model(ranks, name):
    *_, rule = DEFECTS[name]
    for defects in ranks:
        first, stopped, begun, unknown, again = defects[name]
        assert first.keys() == {rule}
        assert stopped == first  # nothing more is found
        assert begun == unknown == {}
        assert again.keys() == {rule}
        assert again[rule][0] == 1  # step
        assert again[rule][1] < first[rule][1]


def test_findings_stay_until_the_next_start(nothing_left):
    audit.start()
    running_audit().ledger.report("stepped-once", "again", "it steps again")
    audit.start()  # only changes its settings
    audit.stop()
    audit.stop()  # does nothing
    assert len(audit.findings()) == 1
    audit.start()
    assert audit.findings() == []
    audit.stop()


# ------------------------------------------------------------------------ the modules
MUTABLE = (Counter, dict, list, set, weakref.WeakKeyDictionary, weakref.WeakSet, weakref.WeakValueDictionary)
"""In a side table are facts about objects, gone with them."""


CONSTANTS = {"BEFORE_STEP", "CATALOGUE", "_EVENTS", "_FOUND", "_SHAPE", "_field_defaults"}


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(audit.__file__).parent.glob("_*.py")))
def test_no_module_keeps_anything_beside_the_audit(name):
    module = importlib.import_module("megapatch.audit" + f".{name}" * (name != "__init__"))
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    for owner in (module, *(value for value in own if isinstance(value, type))):
        kept = {key for key, value in vars(owner).items() if isinstance(value, MUTABLE) and key[:2] != "__"}
        assert not kept - CONSTANTS
    assert not [value for value in own if hasattr(value, "cache_info")]
