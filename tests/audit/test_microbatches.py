"""Microbatches alone: which tokens, losses, factors and counts are wrong, and which are not."""

from __future__ import annotations

import pytest
import torch
from rigs.audit import Thing, part_of, watcher_of
from rigs.chunks import Chunk, reported

from megapatch.audit._audit import Call, Step
from megapatch.audit._microbatches import Microbatches


def train(part, chunk, *microbatches, trains=True):
    """Make a call of these (loss, tokens)."""
    watch = watcher_of(part, "forward_step")
    call = Call([chunk], trains)
    part.begin_call(call)
    for loss, tokens in microbatches:
        result = None if loss is None else [torch.tensor(loss)], torch.tensor(tokens)
        watch(lambda *_, result=result: result)(None, None, chunk)
    part.end_call(call)


@pytest.mark.parametrize(
    ("options", "is_wrong"),
    [
        ({}, False),
        ({"factor": 0.5}, True),
        ({"factor": 0.5, "size": 1}, False),
        ({"factor": 0.5, "by_tokens": False}, False),
        ({"by_tokens": False}, True),
        ({"by_tokens": False, "averages": True}, False),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_a_factor_is_wrong_for_the_other_way_of_dividing(watching, options, is_wrong, trains):
    part_of(watching, Microbatches).begin_call(Call([Chunk(), Chunk(**options)], trains))
    assert reported(watching) == [("tokens-counted", "factor")] * (is_wrong and trains)


def test_a_model_without_buckets_has_no_factor(watching):
    chunk = Chunk(factor=0.5)
    chunk.buffers = []
    part_of(watching, Microbatches).begin_call(Call([chunk], trains=True))
    assert reported(watching) == []


def test_microbatches_are_those_of_the_innermost_call_and_a_loss_is_one_number(watching):
    part, chunk = part_of(watching, Microbatches), Chunk()
    watch, outer = watcher_of(part, "forward_step"), Call([chunk], trains=True)

    def forward(output):
        watch(lambda *_: (output, torch.tensor(3)))(None, None, chunk)
        return watching.ledger.judged["tokens-counted losses"]

    assert forward(torch.tensor(1.0)) == 0  # of a loop without a schedule
    part.begin_call(outer)
    train(part, chunk, (1.0, 3), trains=False)
    loss = torch.tensor(1.0, requires_grad=True)
    assert [forward(loss), forward([loss]), forward(torch.ones(2))] == [1, 2, 2]
    assert not any(each.requires_grad for each in part._trained.get(chunk).losses)
    part.end_call(outer)
    assert forward(torch.tensor(1.0)) == 2
    part.finishing([chunk], torch.tensor(9))
    watching.models.optimizers_of = lambda chunk: []
    *hashes, (count, *of_losses), (divisor, _, are_known) = part.added_to(torch.zeros(2, 3), [chunk]).tolist()
    assert (hashes, count, of_losses, divisor, are_known) == ([[0] * 3] * 2, 3, [0, 0], 9, 0)
    assert part.added_to(torch.zeros(0, 3), [chunk]).tolist()[0] == [0, 0, 0] and reported(watching) == []


def test_ranks_compare_their_losses_and_their_rates(watching):
    part, chunk, groups = part_of(watching, Microbatches), Chunk(), [{"lr": 0.1}]
    watching.models.optimizers_of = lambda chunk: [Thing(optimizer=Thing(param_groups=groups))]

    def rows(*losses):
        train(part, chunk, *((loss, 1) for loss in losses))
        return part.added_to(torch.zeros(0, 3, dtype=torch.int64), [chunk]).tolist()

    first, again, other, only_signs, nan = map(
        rows, *zip((1.0, 2.0), (1.0, 2.0), (1.0, 3.0), (1.0, -1.0), (1.0, float("nan")), strict=True)
    )
    assert first == again != other and first[0][0] == 2 and any(first[0][1:])
    assert only_signs[0] == nan[0] == [2, 0, 0] and {row[1][2] for row in (first, other, nan)} == {1}
    for group in ({"lr": 0.2}, {"lr": 0.1, "weight_decay": 0.1}):
        groups[:] = [group]
        assert rows(1.0, 2.0)[1][1] != first[1][1]
    assert reported(watching) == []


@pytest.mark.parametrize(
    ("history", "counts", "trains", "is_old"),
    [
        ({"before": 1}, 3, True, True),
        ({"before": 1}, 0, True, False),
        ({"before": 1}, None, True, False),  # no experts
        ({"before": 1}, 3, False, False),
        ({"before": 1, "arrivals": 1}, 3, True, False),  # the second call of a step
        ({"before": 1, "arrivals": 1, "stepped": True}, 3, True, True),  # gradients that were not zeroed
        ({}, 3, True, False),  # before the first step
    ],
)
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_counts_are_old_as_the_first_call_of_a_step_begins(
    watching, history, counts, trains, is_old, is_forgotten
):
    part, chunk, other = part_of(watching, Microbatches), Chunk(counts=counts), Chunk(counts=counts and 0)
    vars(chunk.state).update(history)
    part.begin_call(Call([other, chunk], trains))
    if is_forgotten:
        part.forget()
    for _ in range(2):
        part.end_step(Step(torch.nn.Module(), [chunk]))
    assert reported(watching) == [("fresh-counts", "call")] * (is_old and not is_forgotten)
    assert watching.ledger.judged["fresh-counts"] == (is_old or counts == 0)


@pytest.mark.parametrize(
    ("calls", "divisor", "kinds"),
    [
        ([[(1.0, 3), (1.0, 4)]], 7, []),
        ([[(1.0, 3)], [(1.0, 4)]], 7, []),
        ([[(1.0, 3)], [(1.0, 4)]], 4, ["normalizer"]),
        ([[(1.0, 3)], [(1.0, 4)]], 1000, []),  # a constant
        ([[(1.0, 0)]], 0, ["without"]),
        ([[(0.0, 0)]], 0, []),
        ([[(None, 0)]], 0, []),  # a stage that is not the last
        ([[(1.0, 3)], [(1.0, 4)]], None, []),
    ],
)
@pytest.mark.parametrize("evaluates", [False, True])
def test_tokens_that_were_divided_by_are_those_of_all_calls(watching, calls, divisor, kinds, evaluates):
    part, chunk = part_of(watching, Microbatches), Chunk()
    for microbatches in calls:
        train(part, chunk, *microbatches)
    if evaluates:
        train(part, chunk, (1.0, 5), trains=False)
    part.finishing([Chunk(), chunk], None if divisor is None else torch.tensor(divisor))
    part.judge()
    assert reported(watching) == [("tokens-counted", kind) for kind in kinds]
    assert watching.ledger.judged["tokens-counted divisors"] == (divisor is not None)
    part.judge()
    assert reported(watching) == [("tokens-counted", kind) for kind in kinds]


def test_tokens_are_those_since_gradients_were_zeroed(watching):
    part, chunk, other = part_of(watching, Microbatches), Chunk(), Chunk()
    for each in (other, chunk):
        train(part, each, (float("nan"), 3))
    part.zeroed(chunk.buffers[0])
    train(part, chunk, (1.0, 4))
    part.finishing([chunk], torch.tensor(4))
    assert other in part._counted
    step = Step(torch.nn.Module(), [chunk])
    step.succeeded = True
    part.end_step(step)
    assert reported(watching) == []


@pytest.mark.parametrize(
    ("loss", "succeeded", "weight", "is_wrong"),
    [
        (float("nan"), True, float("nan"), True),
        (float("inf"), True, float("nan"), True),
        (float("nan"), True, 1.0, False),  # its gradients were cleaned by hand
        (float("nan"), False, float("nan"), False),
        (1.0, True, float("nan"), False),
    ],
)
def test_a_step_on_a_loss_that_is_nan_has_made_weights_nan(watching, loss, succeeded, weight, is_wrong):
    part, chunk, optimizer = part_of(watching, Microbatches), Chunk(), torch.nn.Module()
    optimizer.optimizer = Thing(param_groups=[{"params": [torch.full((1,), weight)]}])
    watching.models.optimizers_of = lambda chunk: [optimizer]
    train(part, chunk, (loss, 1))
    watching.ledger.step = 5  # in which nothing is due
    for _ in range(2):
        step = Step(optimizer, [chunk])
        step.succeeded = succeeded
        part.end_step(step)
        watching.ledger.step += 1
    assert reported(watching) == []
    part.judge()
    assert reported(watching) == [("tokens-counted", "loss")] * is_wrong


ALIKE = ((4, 7, 8), (100, 5, 1))


@pytest.mark.parametrize(
    ("highest", "lowest", "kinds"),
    [
        (ALIKE, ((4, 6, 8), (100, 5, 1)), []),
        (ALIKE, ((3, 6, 8), (100, 5, 1)), ["calls-alike"]),
        (ALIKE, ((3, 7, 8), (100, 5, 1)), ["calls-alike"]),
        (ALIKE, ALIKE, ["data-differs"]),
        (((0, 0, 0), (0, 5, 1)), ((0, 0, 0), (0, 5, 1)), []),
        (((4, 0, 0), (100, 5, 1)), ((4, 0, 0), (100, 5, 1)), []),  # losses that nobody knows
        (ALIKE, ((4, 6, 8), (90, 5, 1)), ["tokens-counted"]),
        (ALIKE, ((4, 6, 8), (100, 4, 1)), ["ranks-agree"]),
        (ALIKE, ((4, 6, 8), (100, 4, 0)), []),  # rates that a rank does not know
    ],
)
def test_what_ranks_have_alike(watching, highest, lowest, kinds):
    part = part_of(watching, Microbatches)
    part.judge_ranks("all ranks", list(map(list, highest)), [[~each for each in row] for row in lowest])
    assert [rule for rule, _ in reported(watching)] == kinds
    said = " ".join(each.what for each in (*watching.ledger.findings(), *watching.ledger.notes()))
    assert ("on 3 to 4 microbatches" in said) == (kinds == ["calls-alike"])
    assert ("by 90 to 100 tokens" in said) == (kinds == ["tokens-counted"])
    assert watching.ledger.judged["calls-alike"] == (highest[0][0] > 0)
    assert watching.ledger.judged["data-differs"] == (highest[0][1] > 0)
