"""A step in pieces against Megatron's own step of one call, on real megatron-core, at 2 and 4 ranks: gradient
norm, every gradient buffer, parameters and the number of reduces, over three steps."""

from __future__ import annotations

import sys
from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from rigs.cells import once, run_cells
from rigs.megatron.options import BOTH, GRADS, UNPATCHED
from rigs.train_step.layouts import CASES, NO_ATTENTION, NOT_KNOWN_HERE, PER_TOKEN, TOKENS, in_layouts, model_of
from rigs.train_step.models import allow_sequence_parallel, in_pieces
from rigs.where import chosen, with_nightly

from megapatch.train_step import TrainStep

STEPS = 3
CUTS = {"one call": (4,), "three": (1, 1, 2), "uneven": (1, 3), "three, the last known": (1, 1, 2)}
# Interleaved stages take a multiple of their number.
CUTS_OF_STAGES = {"one call": (8,), "three": (2, 2, 4), "uneven": (2, 6), "three, the last known": (2, 2, 4)}

COUNTS = {  # the sum of losses by tokens counted by the caller, against calculate_per_token_loss
    "dp2, count": (2, {}, {}),
    "dp2, count, overlap": (2, {}, GRADS),
    "dp2, count, both": (2, {}, BOTH),
    "dp2, count, with calculate_per_token_loss": (2, {}, PER_TOKEN),
    "cp2, count": (2, {"cp": 2}, {**NO_ATTENTION, **GRADS}),
    "pp2 dp2, count": (4, {"pp": 2}, GRADS),
    "tp2 pp2, count": (4, {"tp": 2, "pp": 2}, {}),
}

# With each Megatron; the others with the newest: they differ in what its versions do alike.
WITH_EACH = {
    "dp2, tokens, overlap",
    "dp2, distributed optimizer, both",
    "dp2, fp16",
    "dp2, multi-token prediction",
    "dp2, layer-wise",
    "pp2, tokens",
    "tp2, sequence parallel",
    "ep2",
    "ep2, tokens",
    "pp2 vpp2 dp2, both",
    "dp4, two optimizer instances",
    "cp2, tokens",
    "dp2, count, both",
    "dp2, count, with calculate_per_token_loss",
    "pp2 dp2, count",
}

QUICK = {"dp2, tokens, overlap", "dp2, distributed optimizer, both", "dp2, fp16", "pp2, tokens"}
TOLD_THE_LAST = set(sorted(WITH_EACH - QUICK)[::2])


def is_of_each(name, cut):
    """One cut for a case; the others take turns with those of the other cases."""
    return name in WITH_EACH and cut == ("three, the last known" if name in TOLD_THE_LAST else "uneven")


def cuts_of(layout):
    return CUTS_OF_STAGES if layout.get("vpp") else CUTS


def with_cuts(cases):
    """The parameters of the tests: each case with its cuts, of which one call is for those of each Megatron."""
    found = [(name, cut) for name, case in cases.items() for cut in cuts_of(case[1])]
    with_each = [one for one in found if is_of_each(*one)]
    others = [one for one in found if one not in with_each and (one[0] in WITH_EACH or one[1] != "one call")]
    thorough = [
        pytest.param(*one.values, marks=(*one.marks, pytest.mark.thorough)) for one in with_nightly(others)
    ]
    quick = [(name, "uneven") for name in QUICK & cases.keys()]
    marked = [pytest.param(*one, marks=pytest.mark.quick if one in quick else ()) for one in with_each]
    return [*marked, *thorough]


class Counted(NamedTuple):
    """Reduces of a step. Megatron's schedule for virtual stages starts some groups a second time, to no effect."""

    starts: int
    collectives: int


class Reduces:
    """Counts reduces of gradients: starts of bucket groups, and the collectives that they make."""

    def __init__(self):
        self.module = sys.modules["megatron.core.distributed.param_and_grad_buffer"]
        self.group = self.module._ParamAndGradBucketGroup

    def during(self, function, *args):
        started, collectives, start, inside = [], [], self.group.start_grad_sync, []

        def counted(original):
            def collective(*args, **kwargs):
                collectives.extend(inside)
                return original(*args, **kwargs)

            return collective

        def starting(group, *args, **kwargs):
            started.append(group)
            inside.append(group)
            try:
                return start(group, *args, **kwargs)
            finally:
                inside.pop()

        with (
            mock.patch.object(self.group, "start_grad_sync", starting),
            mock.patch.object(torch.distributed, "all_reduce", counted(torch.distributed.all_reduce)),
            mock.patch.object(
                self.module, "dist_reduce_scatter_func", counted(self.module.dist_reduce_scatter_func)
            ),
        ):
            result = function(*args)
        return result, Counted(len(started), len(collectives))


def plain_step(model, count, loss, step):
    return model.train_step(step, num_microbatches=count, **loss).grad_norm


def split_step(model, cut, loss, last, train_step, step):
    with train_step:
        in_pieces(train_step, model, step, cut, loss, last=last)
        result = train_step.finish()
    assert (result.num_calls, result.num_microbatches) == (len(cut), sum(cut))
    assert result.succeeded
    return result.grad_norm


def trained(model, take_step):
    """By step: gradient norm, gradients, parameters, reduces; then parameters after a step of Megatron's own."""
    config = dict(vars(model.config))
    found = []
    for step in range(STEPS):
        norm, reduces = Reduces().during(take_step, step)
        gradients = model.gradients()
        model.gather_parameters()
        found.append((norm, gradients, model.parameters(), reduces))
    assert vars(model.config) == config
    model.train_step(STEPS, num_microbatches=4)
    model.gather_parameters()
    return found, model.parameters()


def compared(rank, world_size, cases):
    """Of these (case, cut), the differences."""
    allow_sequence_parallel()
    names = {name for name, _ in cases}
    for name, layout, options, loss in in_layouts(CASES, world_size, names):
        cuts = {cut: sizes for cut, sizes in cuts_of(layout).items() if (name, cut) in cases}
        make = partial(model_of, layout, options)
        expected = once(one_call, make, sum(next(iter(cuts.values()))), loss)
        for cut, sizes in cuts.items():
            yield (name, cut), partial(cell, expected, make, sizes, loss, "known" in cut)
    for name, layout, options in in_layouts(COUNTS, world_size, names):
        cuts = {cut: sizes for cut, sizes in CUTS.items() if (name, cut) in cases}
        expected = once(one_call, partial(model_of, layout, {**options, **PER_TOKEN}), 4, TOKENS)
        make = partial(model_of, layout, options)
        for cut, sizes in cuts.items():
            yield (name, cut), partial(cell_of_count, expected, make, sizes, "known" in cut)


def cell(expected, make, sizes, loss, last):
    reference = expected()
    model = make()
    train_step = TrainStep(model.chunks, model.optimizer)
    got = trained(model, partial(split_step, model, sizes, loss, last, train_step))
    return differences(got, reference)


def cell_of_count(expected, make, sizes, last):
    reference, _ = expected()
    model = make()
    train_step = TrainStep(model.chunks, model.optimizer, expected_count=100)
    got, _ = trained(model, partial(split_step, model, sizes, None, last, train_step))
    return differences((got, {}), (reference, {}))


def one_call(make, count, loss):
    model = make()
    return trained(model, partial(plain_step, model, count, loss))


def differences(got, expected):
    """The largest of each kind, relative to the largest value of the tensor; and all of reduces."""
    (steps, last), (expected_steps, expected_last) = got, expected
    found = {"norm": 0.0, "gradients": 0.0, "parameters": largest(last, expected_last), "reduces": []}
    for ours, theirs in zip(steps, expected_steps, strict=True):
        found["norm"] = max(found["norm"], abs(ours[0] - theirs[0]) / theirs[0])
        found["gradients"] = max(found["gradients"], largest(ours[1], theirs[1]))
        found["parameters"] = max(found["parameters"], largest(ours[2], theirs[2]))
        if ours[3].collectives != theirs[3].collectives or ours[3].starts > theirs[3].starts:
            found["reduces"].append((ours[3], theirs[3]))
    return found


def largest(ours, theirs):
    assert ours.keys() == theirs.keys()
    found = [(ours[name] - value).abs().max() / value.abs().max().clamp(1e-30) for name, value in theirs.items()]
    return float(max(found, default=0.0))


@pytest.fixture(scope="module")
def of_ranks(request):
    """By number of ranks, what each of them found, of all cases that are to be tested. One spawn for many."""
    cases = chosen(request, "name", "cut")
    sizes = {(CASES.get(name) or COUNTS[name])[0] for name, _ in cases}
    # Without patches, some of which repair what TrainStep avoids; and the audit finds nothing in any step.
    return {ranks: run_cells(compared, ranks, cases, audited=True, env=UNPATCHED, timeout=1000) for ranks in sizes}


def tolerance(options):
    """fp16 and bf16: activations and their gradients are rounded to 11 or 8 bits, in another order."""
    return {"fp16": 2e-3, "bf16": 1e-2}.get(options.get("dtype"), 1e-5)


def assert_same(found, options):
    limit = tolerance(options)
    assert found["norm"] <= limit
    assert found["gradients"] <= limit
    assert found["parameters"] <= limit
    assert found["reduces"] == []


@pytest.mark.parametrize(("name", "cut"), with_cuts(CASES))
def test_a_step_in_pieces_is_megatrons_step(of_ranks, name, cut):
    ranks, _, options, _ = CASES[name]
    if (name, cut) not in of_ranks[ranks][0]:
        pytest.skip(NOT_KNOWN_HERE)
    for found in of_ranks[ranks]:
        assert_same(found[name, cut], options)


@pytest.mark.parametrize(("name", "cut"), with_cuts(COUNTS))
def test_a_count_of_the_callers_is_megatrons_of_tokens(of_ranks, name, cut):
    ranks, _, options = COUNTS[name]
    for found in of_ranks[ranks]:
        assert_same(found[name, cut], options)
