"""A step in pieces against Megatron's own step of one call, on real megatron-core, at 2 and 4 ranks: gradient
norm, every gradient buffer, parameters and the number of reduces, over three steps."""

from __future__ import annotations

import sys
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.cells import once, run_cells
from rigs.megatron import ADAM, BOTH, GRADS, UNPATCHED
from rigs.train_step import MEAN, MOE, MTP, allow_sequence_parallel, in_pieces

from megapatch.testing import init_parallel, tiny_gpt
from megapatch.train_step import TrainStep

STEPS = 3
CUTS = {"one call": (4,), "three": (1, 1, 2), "uneven": (1, 3), "three, the last known": (1, 1, 2)}
# Interleaved stages take a multiple of their number.
CUTS_OF_STAGES = {"one call": (8,), "three": (2, 2, 4), "uneven": (2, 6), "three, the last known": (2, 2, 4)}

TOKENS = {"masked": True}  # (sum, tokens, metrics), with another number of tokens in each
SHARDED = {**ADAM, "use_distributed_optimizer": True}
FP16 = {"dtype": "fp16", "loss_scale": 2.0**12}
INSTANCES = {"ddp": {"num_distributed_optimizer_instances": 2}}
PER_TOKEN = {"per_token_loss": True}
CASES = {  # number of ranks, layout, options, loss
    "dp2, mean": (2, {}, {}, MEAN),
    "dp2, each microbatch by its tokens": (2, {}, {}, TOKENS),
    "dp2, tokens": (2, {}, PER_TOKEN, TOKENS),
    "dp2, overlap": (2, {}, GRADS, TOKENS),
    "dp2, tokens, overlap": (2, {}, {**GRADS, **PER_TOKEN}, TOKENS),
    "dp2, distributed optimizer": (2, {}, SHARDED, MEAN),
    "dp2, distributed optimizer, overlap": (2, {}, {**SHARDED, **GRADS}, TOKENS),
    "dp2, distributed optimizer, both": (2, {}, BOTH, TOKENS),
    "dp2, distributed optimizer, both, tokens": (2, {}, {**BOTH, **PER_TOKEN}, TOKENS),
    "dp2, bf16": (2, {}, {"dtype": "bf16", **GRADS}, MEAN),
    "dp2, fp16": (2, {}, {**FP16, **GRADS}, MEAN),
    "dp2, fp16, tokens": (2, {}, {**FP16, **PER_TOKEN}, TOKENS),
    "dp2, multi-token prediction": (2, {}, {**MTP, **GRADS}, MEAN),
    "dp2, multi-token prediction, tokens": (2, {}, {**MTP, **PER_TOKEN}, TOKENS),
    "pp2": (2, {"pp": 2}, {}, MEAN),
    "pp2, tokens": (2, {"pp": 2}, {**GRADS, **PER_TOKEN}, TOKENS),
    "tp2": (2, {"tp": 2}, GRADS, TOKENS),
    "tp2, sequence parallel": (2, {"tp": 2}, {"config": {"sequence_parallel": True}}, MEAN),
    "ep2": (2, {"ep": 2}, MOE, MEAN),
    "ep2, tokens": (2, {"ep": 2}, {**MOE, **PER_TOKEN}, TOKENS),
    "pp2 dp2, overlap": (4, {"pp": 2}, GRADS, TOKENS),
    "pp2 dp2, both": (4, {"pp": 2}, BOTH, MEAN),
    "pp2 vpp2 dp2, overlap": (4, {"pp": 2, "vpp": 2}, GRADS, MEAN),
    "pp2 vpp2 dp2, both": (4, {"pp": 2, "vpp": 2}, BOTH, TOKENS),
    "pp2 vpp2 dp2, both, aligned": (4, {"pp": 2, "vpp": 2}, {**BOTH, "align_param_gather": True}, TOKENS),
    "tp2 pp2, tokens": (4, {"tp": 2, "pp": 2}, PER_TOKEN, TOKENS),
    "dp4, two optimizer instances": (4, {"optimizer_instances": 2}, {**SHARDED, **GRADS, **INSTANCES}, TOKENS),
    "dp4, two optimizer instances, tokens": (
        4,
        {"optimizer_instances": 2},
        {**SHARDED, **GRADS, **INSTANCES, **PER_TOKEN},
        TOKENS,
    ),
    "ep2 dp2, overlap": (4, {"ep": 2}, {**MOE, **GRADS}, MEAN),
}
COUNTS = {  # the sum of losses by tokens counted by the caller, against calculate_per_token_loss
    "dp2, count": (2, {}, {}),
    "dp2, count, overlap": (2, {}, GRADS),
    "dp2, count, both": (2, {}, BOTH),
    "dp2, count, with calculate_per_token_loss": (2, {}, PER_TOKEN),
    "pp2 dp2, count": (4, {"pp": 2}, GRADS),
    "tp2 pp2, count": (4, {"tp": 2, "pp": 2}, {}),
}


# With each Megatron; the others with the newest: they differ in what its versions do alike.
WITH_EACH = {
    "dp2, tokens, overlap",
    "dp2, distributed optimizer, both",
    "dp2, fp16",
    "dp2, multi-token prediction",
    "pp2, tokens",
    "tp2, sequence parallel",
    "ep2",
    "ep2, tokens",
    "pp2 vpp2 dp2, both",
    "dp2, count, both",
    "dp2, count, with calculate_per_token_loss",
    "pp2 dp2, count",
}


OF_EACH = ("uneven", "three, the last known")


def cuts_of(layout):
    return CUTS_OF_STAGES if layout.get("vpp") else CUTS


def with_cuts(cases):
    """The parameters of the tests: each case with its cuts, of which one call is for those of each Megatron."""
    found = [
        (name, cut)
        for name, case in cases.items()
        for cut in cuts_of(case[1])
        if name in WITH_EACH or cut != "one call"
    ]
    return [
        pytest.param(*one, marks=() if one[0] in WITH_EACH and one[1] in OF_EACH else pytest.mark.thorough)
        for one in found
    ]


class Reduces:
    """Counts reduces of gradients, as bucket groups dispatch them, each once."""

    def __init__(self):
        self.module = sys.modules["megatron.core.distributed.param_and_grad_buffer"]
        self.group = self.module._ParamAndGradBucketGroup

    def during(self, function, *args):
        dispatched, start, inside = [], self.group.start_grad_sync, []

        def counted(original):
            def collective(*args, **kwargs):
                dispatched.extend(inside[:1])
                return original(*args, **kwargs)

            return collective

        def starting(group, *args, **kwargs):
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
        return result, len(dispatched)


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


def compared(rank, world_size, chosen):
    """Of the chosen (case, cut), the differences."""
    allow_sequence_parallel()
    for name, (ranks, layout, options, loss) in CASES.items():
        cuts = {cut: sizes for cut, sizes in cuts_of(layout).items() if (name, cut) in chosen}
        if ranks == world_size and cuts:
            init_parallel(**layout)
            options = {"layers": 4 if layout.get("vpp") else 2, **options}
            expected = once(one_call, options, sum(next(iter(cuts.values()))), loss)
            for cut, sizes in cuts.items():
                yield (name, cut), partial(cell, expected, options, sizes, loss, "known" in cut)
    for name, (ranks, layout, options) in COUNTS.items():
        cuts = {cut: sizes for cut, sizes in CUTS.items() if (name, cut) in chosen}
        if ranks == world_size and cuts:
            init_parallel(**layout)
            expected = once(one_call, {**options, **PER_TOKEN}, 4, TOKENS)
            for cut, sizes in cuts.items():
                yield (name, cut), partial(cell_of_count, expected, options, sizes, "known" in cut)


def cell(expected, options, sizes, loss, last):
    reference = expected()
    model = tiny_gpt(**options)
    train_step = TrainStep(model.chunks, model.optimizer)
    got = trained(model, partial(split_step, model, sizes, loss, last, train_step))
    return differences(got, reference)


def cell_of_count(expected, options, sizes, last):
    reference, _ = expected()
    model = tiny_gpt(**options)
    train_step = TrainStep(model.chunks, model.optimizer, expected_count=100)
    got, _ = trained(model, partial(split_step, model, sizes, None, last, train_step))
    return differences((got, {}), (reference, {}))


def one_call(options, count, loss):
    model = tiny_gpt(**options)
    return trained(model, partial(plain_step, model, count, loss))


def differences(got, expected):
    """The largest of each kind, relative to the largest value of the tensor; and of reduces."""
    (steps, last), (expected_steps, expected_last) = got, expected
    found = {"norm": 0.0, "gradients": 0.0, "parameters": largest(last, expected_last), "reduces": 0}
    for ours, theirs in zip(steps, expected_steps, strict=True):
        found["norm"] = max(found["norm"], abs(ours[0] - theirs[0]) / theirs[0])
        found["gradients"] = max(found["gradients"], largest(ours[1], theirs[1]))
        found["parameters"] = max(found["parameters"], largest(ours[2], theirs[2]))
        found["reduces"] = max(found["reduces"], abs(ours[3] - theirs[3]))
    return found


def largest(ours, theirs):
    assert ours.keys() == theirs.keys()
    found = [(ours[name] - value).abs().max() / value.abs().max().clamp(1e-30) for name, value in theirs.items()]
    return float(max(found, default=0.0))


@pytest.fixture(scope="module")
def of_ranks(request):
    """By number of ranks, what each of them found, of all cases that are to be tested. One spawn for many."""
    chosen = {
        (item.callspec.params["name"], item.callspec.params["cut"])
        for item in request.session.items
        if item.path == request.path
    }
    # Without patches, some of which repair what TrainStep avoids.
    return {ranks: run_cells(compared, ranks, chosen, env=UNPATCHED, timeout=400) for ranks in (2, 4)}


def tolerance(options):
    """fp16 and bf16: activations and their gradients are rounded to 11 or 8 bits, in another order."""
    return {"fp16": 2e-3, "bf16": 1e-2}.get(options.get("dtype"), 1e-5)


def assert_same(found, options):
    limit = tolerance(options)
    assert found["norm"] <= limit
    assert found["gradients"] <= limit
    assert found["parameters"] <= limit
    assert found["reduces"] == 0


@pytest.mark.parametrize(("name", "cut"), with_cuts(CASES))
def test_a_step_in_pieces_is_megatrons_step(of_ranks, name, cut):
    ranks, _, options, _ = CASES[name]
    for found in of_ranks[ranks]:
        assert_same(found[name, cut], options)


@pytest.mark.parametrize(("name", "cut"), with_cuts(COUNTS))
def test_a_count_of_the_callers_is_megatrons_of_tokens(of_ranks, name, cut):
    ranks, _, options = COUNTS[name]
    for found in of_ranks[ranks]:
        assert_same(found[name, cut], options)
