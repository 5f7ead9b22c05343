"""A long run of a correct trainer, with what trainers do between steps: nothing is found, and nothing grows."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from rigs.audit import running_audit
from rigs.cells import AUDITED
from rigs.megatron.options import ADAM, UNPATCHED
from rigs.mistakes.schedules import schedule_of
from rigs.mistakes.weights import log_probabilities, put, reference_in

from megapatch import audit
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

STEPS, BROKEN_STEPS, WARM_UP = 10_000, 3_000, 1_000
MOST = 1 / 3
"""Blocks of Python's memory a step that may come and go (505 of them have been seen): one more would be 1."""
OPTIONS = {"dtype": "bf16", **ADAM, "use_distributed_optimizer": True}
EVERY = {"reference": 97, "load": 101, "offload": 103, "evaluation": 11}
"""How many steps there are between two of each."""


def evaluation(model, step):
    log_probabilities(model, step)


def reference(model, step):
    with reference_in(model) as policy:
        log_probabilities(model, step)
    put(model, policy)


def load(model, step):
    model.chunks[0].load_state_dict(model.chunks[0].state_dict())
    model.optimizer.reload_model_params()


def offload(model, step):
    """Free the memory of parameters, as colocated trainers do, and bring them back."""
    for buffer in model.chunks[0].buffers:
        kept, storage = buffer.param_data.clone(), buffer.param_data.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        buffer.param_data.copy_(kept)


def counts():
    """Return how many blocks of Python's memory there are, and how many tensors."""
    audit.findings()  # reads the results that wait for the next close look
    gc.collect()
    return sys.getallocatedblocks(), sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def grown(model, steps, take_step):
    """Return by how much memory grows in some steps after the first ones."""
    for step in range(steps):
        if step == WARM_UP:
            before = counts()
        take_step(model, step)
    return [after - then for after, then in zip(counts(), before, strict=True)]


def correct(model, step):
    for between in (evaluation, reference, load, offload):
        if step % EVERY[between.__name__] == 0:
            between(model, step)
    model.train_step(step, num_microbatches=1)
    schedule_of(model).step(1)


def never_zeroed(model, step):
    model.forward_backward(step, num_microbatches=1)
    model.optimizer.step()


def soak(rank, world_size, steps, broken_steps):
    torch.set_num_threads(1)
    init_parallel()
    model = tiny_gpt(layers=1, **OPTIONS)
    healthy = grown(model, steps, correct)
    found = running_audit().ledger.step, [str(each) for each in (*audit.findings(), *audit.notes())]
    return found, healthy, grown(model, broken_steps, never_zeroed), [each.count for each in audit.findings()]


@pytest.mark.nightly
def test_nothing_is_found_and_nothing_grows_in_a_long_run():
    env = {**UNPATCHED, **AUDITED, "MEGAPATCH_AUDIT_EVERY": "50"}
    ranks = run_ranks(soak, 2, STEPS, BROKEN_STEPS, env=env, timeout=1800.0)  # 5 minutes on an idle machine
    for found, (blocks, tensors), (broken_blocks, broken_tensors), seen in ranks:
        assert found == (STEPS, [])
        assert blocks < MOST * (STEPS - WARM_UP) and tensors <= 0
        assert broken_blocks < MOST * (BROKEN_STEPS - WARM_UP) and broken_tensors <= 0
        assert max(seen) >= BROKEN_STEPS - 1  # a finding is one, however often it is made
