"""Notes are no findings, raise nothing, and can be accepted; a rule is kept only if there was something to see."""

from __future__ import annotations

import logging
import os
from functools import partial

import pytest
from rigs.audit import idle_audit, running_audit
from rigs.cells import AUDITED, RAISING, run_cells
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED
from rigs.mistakes.table import MISTAKES

from megapatch import audit
from megapatch.audit._findings import Ledger
from megapatch.audit._report import rules_of
from megapatch.audit._settings import bad_values
from megapatch.testing import init_parallel, tiny_gpt

ACCEPT = "MEGAPATCH_AUDIT_ACCEPT"


def is_note(rule):
    return audit.RULES[rule].is_note


ALONE = [mistake for mistake in reversed(MISTAKES.values()) if len(mistake.finds) == 1]
BY_RULE = {rule: mistake for mistake in ALONE for rule in mistake.finds}
MISTAKES_NOTED = {mistake.name: mistake for rule, mistake in BY_RULE.items() if is_note(rule)}
"""One for each note."""
NAMES = [*MISTAKES_NOTED]
RULES = {rule for mistake in MISTAKES_NOTED.values() for rule in mistake.finds}


def noted(mistake):
    init_parallel(**mistake.layout)
    audit.clear()
    model = tiny_gpt(layers=4, **mistake.options)
    for step in range(3):
        mistake.take_step(model, step)
    return [found.rule for found in audit.findings()], [str(note) for note in audit.notes()]


def job(rank, world_size, names=NAMES):
    for name in names:
        yield name, partial(noted, MISTAKES_NOTED[name])


def test_with_raise_a_note_raises_nothing():
    for cells in run_cells(job, 2, NAMES[:4], env={**UNPATCHED, **RAISING}):
        assert all(cells[name][0] == [] and cells[name][1] for name in NAMES[:4])


@pytest.mark.parametrize(
    "names", [NAMES[:4], pytest.param(NAMES[4:], marks=pytest.mark.nightly)], ids=["four", "others"]
)
def test_an_accepted_one_is_not_kept(names):
    for cells in run_cells(job, 2, names, env={**UNPATCHED, **AUDITED, ACCEPT: ",".join(RULES)}):
        assert [cells[name] for name in names] == [([], [])] * len(names)


def test_these_are_all():
    assert set(filter(is_note, audit.RULES)) == RULES


def test_an_accepted_finding_is_said_at_the_start_and_not_kept(monkeypatch, caplog, nothing_left):
    monkeypatch.setenv(ACCEPT, "stepped-once,schedule-once")
    audit.start()
    running_audit().ledger.report("stepped-once", "again", "it steps again")
    assert audit.findings() == []
    assert {rule.name: rule.status for rule in audit.report().rules}["stepped-once"] == "accepted"
    audit.stop()
    assert caplog.messages[0].startswith(f"audit: {ACCEPT}=stepped-once: findings of it are not kept")


def test_the_first_note_of_a_rule_is_one_warning_when_it_is_seen_and_all_are_listed_at_the_end(caplog):
    caplog.set_level(logging.INFO, "megapatch")
    ledger = Ledger()
    ledger.step = 1
    for kind in ("copies", "copies", "late"):
        ledger.report("saved-is-trained", kind, f"saved: {kind}", where=("train.py:3 in save",))
    ledger.summarize()
    assert [record.levelname for record in caplog.records] == ["WARNING", *["INFO"] * 3, "WARNING"]
    first, second, nothing, listed, warned = caplog.messages
    assert first.startswith("audit: note: saved-is-trained (after 1 optimizer step): saved: copies. The run ")
    assert "At train.py:3 in save." in first and second.startswith("audit: note: saved-is-trained")
    assert nothing == "audit: nothing found in 1 optimizer step"
    assert listed.startswith("audit: noted in 1 optimizer step:\n  saved-is-trained")
    assert warned.startswith("audit: 2 notes of saved-is-trained; with MEGAPATCH_REPORT=FOLDER, megapatch audit")


def test_each_way_of_breaking_a_rule_is_a_warning_if_it_is_a_finding(caplog):
    caplog.set_level(logging.INFO, "megapatch")
    ledger = Ledger()
    for kind in ("left", "machine", "left"):
        ledger.report("hooks-balanced", kind, "a hook")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (" saved-is-trained, ranks-agree,", None),
        ("resume", "no rule is called 'resume'; did you mean resumed or resumed-together or gradients-used?"),
    ],
)
def test_names_are_checked(names, complaint):
    expected = [f"{ACCEPT}: {complaint}"] if complaint else []
    assert bad_values({**os.environ, ACCEPT: names}) == expected


# ------------------------------------------------------------------------ rules in a report
def test_each_rule_is_looked_at_by_a_part():
    watched = [rule for part in idle_audit().parts for rule in rules_of(part)]
    assert sorted(watched) == sorted(audit.RULES)


def own_loop(rank, world_size):
    """Train by hand, without Megatron's schedules, and return the rules that are not watched."""
    init_parallel()
    model = tiny_gpt()
    (ddp,) = model.chunks
    for _ in range(2):
        model.zero_grad()
        sum(parameter.square().sum() for parameter in ddp.parameters()).backward()
        ddp.finish_grad_sync()
        model.optimizer.step()
    return {rule.name: rule.judged for rule in audit.report().rules if rule.status == "kept"}


def test_a_rule_that_had_nothing_to_look_at_is_not_said_to_be_kept():
    twice = ("reduced-once", "fresh-gradients", "gradients-used", "gradients-dropped", "gradients-arrive")
    for kept in run_with_megatron(own_loop, 2, env={**UNPATCHED, **AUDITED}):
        assert kept == {**dict.fromkeys((*twice, "stepped-once", "ranks-agree"), 2), "kept-between-steps": 1}


def started_late(rank, world_size):
    """Wrap a model, and then begin to watch: its gradients are never zeroed."""
    init_parallel()
    model = tiny_gpt()
    audit.start(every=1)
    for step in range(3):
        model.forward_backward(step)
        model.optimizer.step()
    return {rule.name: rule.reason for rule in audit.report().rules if rule.status == "not watched"}


def test_gradients_of_a_model_that_was_wrapped_before_are_not_watched():
    for blind in run_with_megatron(started_late, 2, env=UNPATCHED):
        assert blind["fresh-gradients"] == "no steps with gradients"
        assert {"reduced-once", "main-params-agree", "scaled-once", "unscaled-once"} <= blind.keys()
