"""A step in pieces of a module with FSDP2's fully_shard, at 2 ranks, against the same steps in one process without
FSDP2, of all microbatches at once: gradient norm, gradients and parameters, over three steps."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from rigs.cells import run_cells
from rigs.train_step.fsdp import (
    GAMMA,
    LEARNING_RATE,
    Sharded,
    device_mesh,
    forward_step,
    largest_difference,
    loss_of,
    microbatches,
    normalizer,
    plain_model,
    reference,
)
from torch.distributed.fsdp import FSDPModule

from megapatch._verify.operations import Operations

pytestmark = pytest.mark.thorough  # needs no Megatron at all
STEPS = range(3)
CUTS = {  # microbatches of each rank, by call
    "one call": ((4, 4),),
    "two": ((2, 2), (2, 2)),
    "three": ((1, 1), (1, 1), (2, 2)),
    "uneven pieces": ((1, 1), (3, 3)),
    "uneven ranks": ((3, 1),),
    "uneven both": ((1, 2), (3, 1)),
    "a rank without": ((2, 1), (0, 2), (1, 0)),
    "an empty call": ((1, 1), (0, 0), (1, 1)),
}
CLIP = 0.1
CASES = {  # options, options of the reference
    "mean": ({}, {}),
    "mean, expected": ({"expected_microbatches": 3}, {}),
    "count": ({"counting": True}, {"counting": True}),
    "clip": ({"max_grad_norm": CLIP}, {"max_grad_norm": CLIP}),
    "clip, not reached": ({"max_grad_norm": 100.0}, {}),
    "count, clip": ({"counting": True, "max_grad_norm": CLIP}, {"counting": True, "max_grad_norm": CLIP}),
}
UNEVEN = CUTS["a rank without"]


def cuts_of(case):
    return list(CUTS) if case in ("mean", "count") else ["a rank without"]


def trained(sharded, cut, step=None):
    """By step: the result, the state after it."""
    found = []
    for number in STEPS:
        result = (step or Sharded.step)(sharded, number, cut)
        found.append((result, sharded.state()))
    return found


def by_hand(sharded, step, cut):
    """A loop of the caller's own. Passes that count nothing may have any loss."""
    with sharded.train_step as train_step:
        last = None
        for piece in sharded.pieces(step, cut):
            with train_step.accumulate(len(piece), sharded.count(piece)) as backward:
                for inputs, *rest in itertools.islice(itertools.cycle(piece or last), backward.passes):
                    backward(loss_of(sharded.model(inputs), *rest, sharded.counting))
            last = piece or last
        return train_step.finish()


def with_forward_only(sharded, step, cut):
    """Evaluated between the last call and finish(), after which the root's parameters stay gathered."""
    with sharded.train_step as train_step:
        sharded.calls(step, cut)
        with torch.no_grad():
            sharded.model(torch.ones(1, 5, dtype=torch.float64))
        return train_step.finish()


def without_sync(sharded, step, cut):
    """After an accumulation of the caller's own that left FSDP2's switches off."""
    sharded.model.set_requires_gradient_sync(False)
    sharded.model.set_is_last_backward(False)
    return sharded.step(step, cut)


def with_two_draws(sharded, step, cut):
    """A forward step function that takes two of what the iterator has for a microbatch."""

    def function(data, model):
        first, second = next(data), next(data)
        return forward_step(False)(iter([first + second]), model)

    with sharded.train_step as train_step:
        for piece in sharded.pieces(step, cut):
            parts = [part for batch in piece for part in (batch[:1], batch[1:])]
            train_step.forward_backward(
                forward_step_func=function, data_iterator=iter(parts), num_microbatches=len(piece)
            )
        return train_step.finish()


def divided_by_one(rank):
    """As after torchtitan's disable_fsdp_gradient_division()."""
    sharded = Sharded(rank)
    for module in sharded.model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return sharded


def compared(rank, world_size):
    for name, (options, _) in CASES.items():
        for cut in cuts_of(name):
            yield (name, cut), lambda options=options, cut=cut: trained(Sharded(rank, **options), CUTS[cut])
    for shape in ((2, 1), (1, 2)):
        mesh = device_mesh(shape, "replicate", "shard")
        yield ("mesh", shape), lambda mesh=mesh: trained(Sharded(rank, mesh=mesh), UNEVEN)
    yield ("by hand", "mean"), lambda: trained(Sharded(rank), UNEVEN, by_hand)
    yield ("by hand", "count"), lambda: trained(Sharded(rank, counting=True), UNEVEN, by_hand)
    yield "forward only", lambda: trained(Sharded(rank), UNEVEN, with_forward_only)
    yield "two draws", lambda: trained(Sharded(rank), UNEVEN, with_two_draws)
    yield "divided by one", lambda: trained(divided_by_one(rank), UNEVEN)
    yield "float32", lambda: trained(Sharded(rank, dtype=torch.float32), UNEVEN)
    yield "not in sync", lambda: trained(Sharded(rank), UNEVEN, without_sync)
    yield "no scheduler", lambda: Sharded(rank, scheduler=False).step(0, UNEVEN).learning_rate
    yield "uneven ranks", lambda: Sharded(rank).step(0, CUTS["uneven ranks"]).num_microbatches
    yield "data of the last step", lambda: first_call_without_data(rank)
    yield "not clipped", lambda: not_clipped(rank)
    yield "metrics", lambda: metrics_of(rank)
    yield "megatron", lambda: [name for name in sys.modules if name.startswith("megatron.")]


def first_call_without_data(rank):
    sharded = Sharded(rank)
    sharded.step(0, ((2, 2),))
    sharded.step(1, ((2, 0), (0, 2)))
    return sharded.state(), len(sharded.train_step._backend.drawn)


def not_clipped(rank):
    """Return the norm, and where the host waits to finish a step, without clipping and with a norm to look at."""
    found = []
    for limit in (None, math.inf):
        sharded = Sharded(rank, max_grad_norm=limit)
        with sharded.train_step:
            sharded.calls(0, UNEVEN)
            with Operations() as operations:
                result = sharded.train_step.finish()
        found.append((result.grad_norm, len(operations.waits)))
    return found


def metrics_of(rank):
    sharded = Sharded(rank)
    with sharded.train_step as step:
        metrics = sharded.calls(0, UNEVEN)
        step.finish()
    return metrics


@pytest.fixture(scope="module")
def ranks():
    return run_cells(compared, 2, timeout=400, megatron=False)


def assert_same(steps, expected, tolerance=1e-12):
    for (result, state), (norm, expected_state) in zip(steps, expected, strict=True):
        assert result.grad_norm == pytest.approx(norm, rel=tolerance)
        assert largest_difference(state, expected_state) < tolerance


@pytest.mark.parametrize(("case", "cut"), [(case, cut) for case in CASES for cut in cuts_of(case)])
def test_a_step_in_pieces_is_one_of_the_whole_batch(ranks, case, cut):
    expected = reference(STEPS, CUTS[cut], **CASES[case][1])
    for found in ranks:
        assert_same(found[case, cut], expected)


def test_without_clipping_nobody_waits_for_a_norm(ranks):
    for found in ranks:
        (norm, waits), (seen, more) = found["not clipped"]
        assert (norm, waits) == (None, 1)
        assert seen > 0 and more == 2


def test_clipping_is_reached_in_each_step():
    for counting in (False, True):
        assert all(norm > CLIP for norm, _ in reference(STEPS, UNEVEN, counting, CLIP))


@pytest.mark.parametrize("case", CASES)
def test_the_result(ranks, case):
    options, _ = CASES[case]
    for found in ranks:
        for step, (result, _) in enumerate(found[case, "a rank without"]):
            assert result.succeeded
            assert result.num_zeros is None
            assert result.learning_rate == pytest.approx(LEARNING_RATE * GAMMA**step)
            assert result.weight_decay == 0.01
            assert result.num_microbatches == 3  # of this rank
            assert result.num_calls == 3
            assert result.normalizer == normalizer(step, UNEVEN, options.get("counting", False))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_with_replicas(ranks, shape):
    for found in ranks:
        assert_same(found["mesh", shape], reference(STEPS, UNEVEN))


@pytest.mark.parametrize("mode", ["mean", "count"])
def test_a_loop_of_the_callers_own(ranks, mode):
    for found in ranks:
        assert_same(found["by hand", mode], reference(STEPS, UNEVEN, mode == "count"))


@pytest.mark.parametrize("name", ["forward only", "two draws", "divided by one", "not in sync"])
def test_a_step_with(ranks, name):
    for found in ranks:
        assert_same(found[name], reference(STEPS, UNEVEN))


def test_single_precision(ranks):
    """Which FSDP2 reduces in another way."""
    expected = reference(STEPS, UNEVEN)
    for found in ranks:
        for _, state in [*found["float32"], *expected]:
            state.pop("scale", None)  # its gradient is one number, a small sum of large ones
        assert_same(found["float32"], expected, tolerance=1e-6)


def test_a_first_call_without_data_takes_that_of_the_last_step(ranks):
    (first, kept), (second, also_kept) = (found["data of the last step"] for found in ranks)
    assert largest_difference(first, second) == 0.0
    assert (kept, also_kept) == (1, 1)  # that of one microbatch


def test_metrics_are_those_of_the_ranks_own_microbatches(ranks):
    model = plain_model()
    for rank, found in enumerate(ranks):
        batches = iter(microbatches(0, rank, 3))
        expected = [[next(batches) for _ in range(sizes[rank])] for sizes in UNEVEN]
        losses = [[loss_of(model(inputs), *rest, False).item() for inputs, *rest in call] for call in expected]
        assert [[one["loss"] for one in call] for call in found["metrics"]] == [
            pytest.approx(call) for call in losses
        ]


def test_a_scheduler_is_not_needed(ranks):
    assert [found["no scheduler"] for found in ranks] == [LEARNING_RATE] * 2


def test_microbatches_of_a_rank(ranks):
    assert [found["uneven ranks"] for found in ranks] == [3, 1]


def test_megatron_is_not_imported(ranks):
    assert [found["megatron"] for found in ranks] == [[], []]


def test_torch_is_not_imported_before_there_is_a_model():
    code = "import sys, megapatch.train_step; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
