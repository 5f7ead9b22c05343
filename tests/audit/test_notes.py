"""Notes: what trainers may do on purpose is no finding, raises nothing, and can be accepted by its name."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from rigs.cells import AUDITED, RAISING
from rigs.megatron.options import UNPATCHED

from megapatch import audit
from megapatch.audit._findings import Ledger
from megapatch.audit._settings import bad_values
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

ACCEPT = "MEGAPATCH_AUDIT_ACCEPT"


def divided_by_a_constant(rank, world_size):
    """Dr. GRPO: the length of a response is no part of the divisor."""
    init_parallel()
    model = tiny_gpt(per_token_loss=True)
    finalize = model.config.finalize_model_grads_func
    model.config.finalize_model_grads_func = lambda chunks, tokens, **others: finalize(
        chunks, torch.full_like(tokens, 1000), **others
    )
    for step in range(3):
        model.train_step(step, masked=True)
    return [found.invariant for found in audit.findings()], [str(note) for note in audit.notes()]


@pytest.mark.parametrize("audited", [AUDITED, RAISING], ids=["1", "raise"])
def test_a_note_is_no_finding_and_says_how_to_accept_it(audited):
    for found, (note,) in run_ranks(divided_by_a_constant, 2, env={**UNPATCHED, **audited}):
        assert found == []
        assert note.startswith("divided-by-tokens (after ")
        assert note.endswith(f" If that is meant: {ACCEPT}=divided-by-tokens.")


def test_an_accepted_one_is_not_kept():
    env = {**UNPATCHED, **AUDITED, ACCEPT: "divided-by-tokens"}
    assert run_ranks(divided_by_a_constant, 2, env=env) == [([], [])] * 2


def test_notes_are_logged_as_info_and_listed_at_the_end(caplog):
    caplog.set_level(logging.INFO, "megapatch")
    ledger = Ledger()
    ledger.step = 1
    ledger.report("divided-by-tokens", "normalizer", "gradients were divided by 7")
    ledger.summarize()
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3
    first, nothing, listed = caplog.messages
    assert first.startswith("audit: note: divided-by-tokens")
    assert nothing == "audit: nothing found in 1 optimizer step"
    assert listed.startswith("audit: noted in 1 optimizer step:\n  divided-by-tokens")


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ("divided-by-tokens", None),
        (" divided-by-tokens, ", None),
        ("divided-by-token", "no note is called 'divided-by-token'; did you mean divided-by-tokens?"),
        ("ranks-agree", "ranks-agree is a finding, and cannot be accepted"),
    ],
)
def test_names_are_checked(names, complaint):
    expected = [f"{ACCEPT}: {complaint}"] if complaint else []
    assert bad_values({**os.environ, ACCEPT: names}) == expected
