"""The rules in a report: each is watched by a part, and kept only if there was something to look at."""

from __future__ import annotations

from rigs.audit import idle_audit
from rigs.cells import AUDITED
from rigs.megatron.options import UNPATCHED

from megapatch import audit
from megapatch.audit._report import rules_of
from megapatch.testing import init_parallel, run_ranks, tiny_gpt


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
    for kept in run_ranks(own_loop, 2, env={**UNPATCHED, **AUDITED}):
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
    for blind in run_ranks(started_late, 2, env=UNPATCHED):
        assert blind["fresh-gradients"] == "no steps with gradients"
        assert {"reduced-once", "main-params-agree", "scaled-once", "unscaled-once"} <= blind.keys()
