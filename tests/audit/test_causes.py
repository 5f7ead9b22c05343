"""Likely causes: each rule has some, in the order of the page, and a finding's kind rules out others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megapatch import audit
from megapatch.audit import RULES
from megapatch.audit._ranks_agree import DATA, EXPERT_DATA, TENSOR
from megapatch.audit._timeline import KINDS

COMPUTED = {
    "gathered-when-read": {"read", "named"},
    "hooks-balanced": {"no-sync", "config", "other"},
    "kept-between-steps": {"weights", "moments"},
    "loaded-is-there": {"steps", "schedule", "rewound"},
    "reduced-once": {"never", "unfinished"},
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
        assert {event for cause in rule.causes for event in cause.after} <= KINDS.keys()


@pytest.mark.parametrize("name", RULES)
def test_causes_are_told_apart(name):
    causes = [cause.cause for cause in RULES[name].causes]
    checks = [(cause.kinds, cause.check) for cause in RULES[name].causes]
    assert causes and len(set(causes)) == len(causes) and len(set(checks)) == len(checks)
    for cause in RULES[name].causes:
        assert not cause.cause.endswith(".") and not cause.check.endswith(".")


@pytest.mark.parametrize(
    ("kind", "first"),
    [(TENSOR, "a parameter without the attribute"), (DATA, "a missing all-reduce")],
)
def test_the_kind_rules_some_out(kind, first):
    assert RULES["ranks-agree"].causes_of(kind)[0].cause.startswith(first)


def test_a_cause_comes_first_after_its_event():
    causes = RULES["main-params-agree"].causes_of("step", ["forward-only"])
    assert causes[0].cause.startswith("a reference") and causes[1].cause.startswith("weights were loaded")
