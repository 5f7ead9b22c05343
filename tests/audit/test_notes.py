"""Notes: what trainers may do on purpose is no finding, raises nothing, and can be accepted by its name."""

from __future__ import annotations

import logging
import os
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.cells import AUDITED, RAISING, run_cells
from rigs.megatron.options import UNPATCHED

from megapatch import audit
from megapatch.audit._findings import Ledger
from megapatch.audit._settings import bad_values
from megapatch.testing import _data, init_parallel, tiny_gpt

ACCEPT = "MEGAPATCH_AUDIT_ACCEPT"


def divided_by_a_constant(model, step):
    """Dr. GRPO: the length of a response is no part of the divisor."""
    finalize = model.config.finalize_model_grads_func
    model.config.finalize_model_grads_func = lambda chunks, tokens, **others: finalize(
        chunks, torch.full_like(tokens, 1000), **others
    )
    model.train_step(step, masked=True)
    model.config.finalize_model_grads_func = finalize


def trained_in_evaluation_mode(model, step):
    model.chunks[0].eval()
    model.train_step(step, masked=True)


def log_probabilities_with_dropout(model, step):
    with torch.no_grad():
        model.forward_backward(step, forward_only=True, masked=True)
    model.train_step(step, masked=True)


def clipped_by_hand(model, step):
    model.zero_grad()
    model.forward_backward(step, masked=True)
    model.chunks[0].buffers[0].grad_data.clamp_(-1.0, 1.0)
    model.optimizer.step()


def other_factor(model, step):
    model.chunks[0].buffers[0].buckets[0].gradient_scaling_factor = 0.25
    model.train_step(step, masked=True)


def schedule_moves_twice(model, step):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    schedule = OptimizerParamScheduler(
        model.optimizer, init_lr=0.0, max_lr=0.1, min_lr=0.0, lr_warmup_steps=2, lr_decay_steps=9,
        lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=9, wd_incr_style="constant",
    )  # fmt: skip
    schedule.load_state_dict(schedule.state_dict())  # moves it, too
    schedule.step(1)
    model.train_step(step, masked=True)
    schedule.step(1)
    schedule.step(1)


def uneven_calls(model, step):
    model.train_step(step, masked=True, num_microbatches=2 + torch.distributed.get_rank())


def same_data(model, step):
    """A sampler that ignores the rank."""

    def of_the_first_rank(*args, **kwargs):
        with mock.patch("megatron.core.parallel_state.get_data_parallel_rank", return_value=0):
            return microbatches(*args, **kwargs)

    microbatches = _data.microbatches
    with mock.patch.object(_data, "microbatches", of_the_first_rank):
        model.train_step(step, masked=True, num_microbatches=2)


NOTES = {
    "calls-alike": uneven_calls,
    "data-differs": same_data,
    "schedule-once": schedule_moves_twice,
    "divided-by-tokens": divided_by_a_constant,
    "training-mode": trained_in_evaluation_mode,
    "evaluation-mode": log_probabilities_with_dropout,
    "gradients-kept": clipped_by_hand,
    "averaged-alike": other_factor,
}


def noted(take_step):
    init_parallel()
    audit.clear()
    model = tiny_gpt(per_token_loss=True, config={"hidden_dropout": 0.1})
    for step in range(3):
        take_step(model, step)
    return [found.invariant for found in audit.findings()], [str(note) for note in audit.notes()]


def job(rank, world_size):
    for name, take_step in NOTES.items():
        yield name, partial(noted, take_step)


@pytest.fixture(scope="module", params=[AUDITED, RAISING], ids=["1", "raise"])
def ranks(request):
    return run_cells(job, 2, env={**UNPATCHED, **request.param})


@pytest.mark.parametrize("name", NOTES)
def test_a_note_is_no_finding_and_says_how_to_accept_it(ranks, name):
    for cells in ranks:
        found, (note,) = cells[name]
        assert found == []
        assert note.startswith(f"{name} (after ")
        assert note.endswith(f" If that is meant: {ACCEPT}={name}.")


def test_an_accepted_one_is_not_kept():
    for cells in run_cells(job, 2, env={**UNPATCHED, **AUDITED, ACCEPT: ",".join(NOTES)}):
        assert [cells[name] for name in NOTES] == [([], [])] * len(NOTES)


def test_these_are_all():
    assert set(NOTES) == {name for name, invariant in audit.INVARIANTS.items() if invariant.is_note}


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
        ("schedule", "no note is called 'schedule'; did you mean schedule-once?"),
        ("ranks-agree", "ranks-agree is a finding, and cannot be accepted"),
    ],
)
def test_names_are_checked(names, complaint):
    expected = [f"{ACCEPT}: {complaint}"] if complaint else []
    assert bad_values({**os.environ, ACCEPT: names}) == expected
