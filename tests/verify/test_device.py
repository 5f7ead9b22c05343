"""Megapatch's requests to a GPU, on a stand-in for one: copies, reads that the host waits for, and collectives.

docs/benchmarks.md has the list. Where Megatron's own code runs as well, what counts is what comes on top of it.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from functools import partial
from unittest import mock

import pytest
from rigs.cells import run_cells
from rigs.device import Device
from rigs.megatron.options import BOTH, GRADS
from rigs.train_step.models import sum_forward_step

import megapatch
from megapatch.streaming import _trainers
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.train_step import TrainStep

pytestmark = pytest.mark.thorough

MEAN, TOKENS = partial(forward_step, two_tuple=True), forward_step
STEPS = {  # layout, options of the model and of TrainStep, forward step: that of TrainStep, and of Megatron's step
    "mean": ({}, {}, {}, MEAN, MEAN),
    "tokens": ({}, {"per_token_loss": True}, {}, TOKENS, TOKENS),
    "count": ({}, {}, {"expected_count": 64.0}, partial(sum_forward_step, masked=False), MEAN),
    "mean, pp2": ({"pp": 2}, {}, {}, MEAN, MEAN),
}
AUDITED = {
    "overlap": BOTH,
    "fp16": {"dtype": "fp16", "loss_scale": 2.0**10, **GRADS},
    "tokens": {"per_token_loss": True, **GRADS},
}


def over_nccl(function, *args):
    """Return what a function does on the device, with a group of NCCL."""
    import torch

    with (
        mock.patch.object(torch.distributed, "get_backend", return_value="nccl"),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        Device().watched() as device,
    ):
        function(*args)
    return device.words


def made_alike():
    """Compare ranks."""
    return over_nccl(megapatch.assert_consistent)


def plan_compared():
    """Compare a checkpoint's structure."""
    from megapatch.patches.megatron import save_plan_cache

    return over_nccl(save_plan_cache._changed_anywhere, mock.Mock(), [], True)


def step_on_top(layout, options, settings, ours, megatrons):
    """Return what a step of two calls by TrainStep does on top of Megatron's own step, and what it does not do."""
    init_parallel(**layout)
    model, plain = tiny_gpt(**GRADS, **options), tiny_gpt(**GRADS, **options)
    step = TrainStep(model.chunks, model.optimizer, **settings)
    for number in range(3):  # Megatron learns in the first
        batches = model.microbatches(number, 2)
        with Device().watched() as split, step:
            for batch in batches:
                called(step.forward_backward, model, ours, [batch], count=8 if settings else None)
            step.finish()
        with Device().watched() as single:
            plain.zero_grad()
            called(schedule(), plain, megatrons, batches, model=plain.chunks, forward_only=False)
            plain.optimizer.step()
    found, usual = Counter(split.words), Counter(single.words)
    return dict(found - usual), dict(usual - found)


def schedule():
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return get_forward_backward_func()


def called(function, of, forward, batches, **options):
    function(
        forward_step_func=forward,
        data_iterator=iter(batches),
        num_microbatches=len(batches),
        seq_length=of.seq,
        micro_batch_size=2,
        **options,
    )


def audited_on_top(every, options=GRADS):
    """Return what the audit adds to the seventh step: with a comparison of the ranks in it, or without.

    It compares after 4 and 8 steps, however seldom.
    """
    from megapatch import audit

    found = []
    for watching in (False, True):
        init_parallel()
        if watching:
            audit.start(every=every)
        model = tiny_gpt(**options)
        for number in range(7):
            with Device().watched() as device:
                model.train_step(number)
        found.append(Counter(device.words))
    audit.stop()
    return dict(found[1] - found[0])


def listed(rank, world_size):
    init_parallel()
    yield "assert_consistent", made_alike
    yield "save plan", plan_compared
    for name, case in STEPS.items():
        yield name, partial(step_on_top, *case)
    for name, options in AUDITED.items():
        yield f"audit, {name}", partial(audited_on_top, 1000, options)
    yield "audit, compared", partial(audited_on_top, 1)


@pytest.fixture(scope="module")
def found():
    return run_cells(listed, 2)[0]


def test_comparing_ranks_is_one_copy_one_all_reduce_and_one_read(found):
    assert found["assert_consistent"] == ["copy to cuda", "allreduce_ (2048,)", "read (2048,)"]


def test_comparing_a_checkpoints_structure_is_one_copy_one_all_reduce_and_one_read(found):
    assert found["save plan"] == ["copy to cuda", "allreduce_ (2,)", "read (2,)"]


def test_a_step_of_several_calls_asks_no_more_than_megatrons_own(found):
    assert found["mean"] == ({}, {})


def test_what_the_ways_to_normalize_add_to_a_step(found):
    assert found["tokens"] == ({"read ()": 1}, {})  # the number of tokens of the whole step
    assert found["count"] == ({"copy to cpu": 1, "allreduce_ (1,)": 1, "read (1,)": 1}, {})  # the step's total


def test_stages_of_a_pipeline_agree_on_the_result_of_a_step(found):
    more, less = found["mean, pp2"]
    assert (more, less) == ({"copy to cpu": 1, "allreduce_ (3,)": 1, "read (3,)": 1}, {})


@pytest.mark.parametrize("model", AUDITED)
def test_the_audit_waits_for_nothing_between_two_comparisons(found, model):
    assert found[f"audit, {model}"] == {}


def test_a_comparison_of_the_audit_is_one_all_reduce_a_group_and_four_reads(found):
    assert found["audit, compared"] == {"allreduce_ (2, 3, 3)": 1, "read (2, 3, 3)": 1, "read ()": 3}


def test_the_trainer_of_ray_actors_has_nothing_to_do_with_a_device():
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(inspect.getsource(_trainers)))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert not any("torch" in (name or "") for name in imported)
