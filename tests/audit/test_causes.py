"""Likely causes: each rule has some, in the order of the page, and a finding's sentence rules out others."""

from __future__ import annotations

import pytest

from megapatch.audit import INVARIANTS
from megapatch.audit._causes import CAUSES, causes_of


def test_every_rule_has_causes_and_nothing_else_has():
    assert CAUSES.keys() == INVARIANTS.keys()
    assert all(CAUSES.values())


@pytest.mark.parametrize("rule", CAUSES)
def test_causes_are_told_apart(rule):
    causes = [cause.cause for cause in CAUSES[rule]]
    checks = [(cause.says, cause.check) for cause in CAUSES[rule]]
    assert len(set(causes)) == len(causes) and len(set(checks)) == len(checks)
    for cause in CAUSES[rule]:
        assert not cause.cause.endswith(".") and not cause.check.endswith(".")


@pytest.mark.parametrize(
    ("what", "first"),
    [
        ("x is not the same on all tensor-parallel ranks (ranks 0-1)", "a parameter without the attribute"),
        ("x is not the same on all data-parallel ranks (ranks 0-1)", "a missing all-reduce"),
    ],
)
def test_the_sentence_rules_some_out(what, first):
    assert causes_of("ranks-agree", what)[0].cause.startswith(first)


def test_a_rule_of_another_version_has_none():
    assert causes_of("unheard-of", "something") == []
