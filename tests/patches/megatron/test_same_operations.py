"""With patches in place, ordinary steps make the same collectives in the same order, and read as few values."""

import contextlib
import importlib
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.cells import run_cells
from rigs.megatron.options import BOTH, GRADS, UNPATCHED
from rigs.train_step.layouts import CASES, NOT_KNOWN_HERE, in_layouts, model_of
from rigs.train_step.models import allow_sequence_parallel
from rigs.where import chosen, with_nightly

import megapatch
from megapatch._verify.operations import Operations
from megapatch.patch import Status
from megapatch.testing import MegatronLoop, megatron_training_available

pytestmark = pytest.mark.thorough

STEPS = 3  # the first, in which overlapping groups learn their parameters, and two like all that follow
LOOPS = {  # Megatron's own train(): number of ranks, layout, options
    "train(), dp2": (2, {}, GRADS),
    "train(), dp2, both": (2, {}, BOTH),
    "train(), pp2 dp2, both": (4, {"pp": 2}, BOTH),
}
BOTH_KINDS = {**CASES, **LOOPS}


def of_steps(layout, options, loss, around=None):
    model = model_of(layout, options)
    found = []
    for step in range(STEPS):
        with Operations() as operations, around or contextlib.nullcontext():
            model.train_step(step, num_microbatches=2, **loss)
        found.append(operations.found)
    return found


def of_loop(layout, options):
    loop = MegatronLoop(model_of(layout, {**options, "hooks": False}), num_microbatches=2)
    with Operations() as operations:
        loop.train(STEPS)
    return [operations.found]


def with_one_more():
    """Change finish_grad_sync() as a bad patch might."""
    from megatron.core.distributed import DistributedDataParallel

    def finish_grad_sync(self, *args, **kwargs):
        torch.distributed.all_reduce(torch.zeros(1).cuda())
        return original(self, *args, **kwargs)

    original = DistributedDataParallel.finish_grad_sync
    return mock.patch.object(DistributedDataParallel, "finish_grad_sync", finish_grad_sync)


def listed(rank, world_size, names):
    importlib.import_module("megatron.core.pipeline_parallel")  # a step that did it would list a diagnosis
    allow_sequence_parallel()
    for name, layout, options, loss in in_layouts(CASES, world_size, names):
        yield name, partial(of_steps, layout, options, loss)
        if name == "dp2, overlap":
            yield "one more", partial(of_steps, layout, options, loss, with_one_more())
    for name, layout, options in in_layouts(LOOPS if megatron_training_available() else {}, world_size, names):
        yield name, partial(of_loop, layout, options)
    yield "applied", applied


def applied():
    return [entry.patch.name for entry in megapatch.report().patches if entry.status is Status.APPLIED]


@pytest.fixture(scope="module")
def of_ranks(request):
    """By number of ranks, what each rank listed: (patched, unpatched)."""
    job = partial(run_cells, listed, timeout=800)
    names = chosen(request, "name") - {None} | {"dp2, overlap"}
    sizes = {BOTH_KINDS[name][0] for name in names}
    return {ranks: (job(ranks, names), job(ranks, names, env=UNPATCHED)) for ranks in sizes}


IN_CI = [name for name, (ranks, *_) in BOTH_KINDS.items() if ranks == 2]


@pytest.mark.parametrize(
    "name",
    [
        *with_nightly(IN_CI),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in BOTH_KINDS if name not in IN_CI),
    ],
)
def test_ordinary_steps_make_the_same_collectives_and_host_reads(of_ranks, name):
    if name in LOOPS and not megatron_training_available():
        pytest.skip("this megatron-core has no megatron.training")
    ranks = BOTH_KINDS[name][0]
    if name not in of_ranks[ranks][0][0]:
        pytest.skip(NOT_KNOWN_HERE)
    for patched, unpatched in zip(*of_ranks[ranks], strict=True):
        first, *others = zip(patched[name], unpatched[name], strict=True)
        if "vpp" in name:  # megatron.grad-ready-window leaves the reduces of the first step to its end
            first = [sorted(operations, key=repr) for operations in first]
        for ours, megatrons in (first, *others):
            assert ours == megatrons
        assert {operation.is_wait for step in patched[name] for operation in step} == {False, True}


def test_the_runs_differ_in_their_patches(of_ranks):
    for patched, unpatched in zip(*of_ranks[2], strict=True):
        assert patched["applied"]
        assert not unpatched["applied"]


def test_a_collective_too_many_is_seen(of_ranks):
    for found in of_ranks[2][1]:
        more, usual = found["one more"], found["dp2, overlap"]
        assert [len(step) for step in more] == [len(step) + 1 for step in usual]
