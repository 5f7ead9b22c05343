"""The rules: each has causes, of kinds that are reported, patches that exist, and its section in docs/audit.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from megapatch import audit
from megapatch.audit import RULES
from megapatch.audit._ranks_agree import DATA, EXPERT_DATA, TENSOR
from megapatch.audit._timeline import KINDS
from megapatch.patches import PATCHES

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()

COMPUTED = {
    "gathered-when-read": {"read", "named"},
    "hooks-balanced": {"changed", "left"},
    "kept-between-steps": {"weights", "moments"},
    "loaded-is-there": {"steps", "schedule", "rewound"},
    "reduced-once": {"never", "unfinished", "averaged", "repeated", "late"},
    "fresh-gradients": {"after-step"},
    "gradients-arrive": {"gone", "stopped", "never"},
    "schedule-once": {"twice", "left"},
    "tokens-counted": {"normalizer", "without"},
    "ranks-agree": {DATA, EXPERT_DATA, TENSOR, "embedding", "apart"},
}
"""Kinds of findings that are not written where they are reported."""


def reported():
    """Return the kinds of findings of each rule, from the calls that report them."""
    found = {rule: set(kinds) for rule, kinds in COMPUTED.items()}
    for path in Path(audit.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "report" and len(node.args) > 2:
                rule, kind = (getattr(argument, "value", None) for argument in node.args[:2])
                found.setdefault(rule, set()).add(kind)
    return found


def test_causes_are_of_kinds_that_are_reported():
    kinds = reported()
    assert kinds.keys() - {None} == RULES.keys()
    for name, rule in RULES.items():
        assert {kind for cause in rule.causes for kind in cause.kinds} | {*rule.noted} <= kinds[name], name
        assert rule.causes and {event for cause in rule.causes for event in cause.after} <= {*KINDS}


def test_the_kind_rules_some_out():
    first = {kind: RULES["ranks-agree"].causes_of(kind)[0].cause for kind in (TENSOR, DATA)}
    assert first[TENSOR].startswith("a parameter without") and first[DATA].startswith("a missing all-reduce")


def test_a_cause_comes_first_after_its_event():
    causes = RULES["main-params-agree"].causes_of("step", ["forward-only"])
    assert causes[0].cause.startswith("a reference") and causes[1].cause.startswith("weights were loaded")


def test_every_rule_has_a_section():
    assert re.findall(r"^### (.*)$", PAGE, re.M) == list(RULES)


def test_repairs_are_patches():
    assert {patch.name for patch in PATCHES} >= {name for rule in RULES.values() for name in rule.patches}


def test_a_finding_names_the_patches_of_its_kind():
    rule = RULES["loaded-is-there"]
    assert rule.patches_of("schedule") == ["megatron.scheduler-after-load"]
    assert rule.patches_of("steps") == ["megatron.load-offloaded-state"]
    for rule in RULES.values():
        known = {kind for cause in rule.causes for kind in cause.kinds}
        assert {kind for kinds in rule.patches.values() for kind in kinds.split()} <= known
