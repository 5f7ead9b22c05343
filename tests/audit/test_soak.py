"""A long run of a correct trainer, with what trainers do between steps: nothing is found, and nothing noted."""

from __future__ import annotations

import pytest
import torch
from rigs.audit import running_audit
from rigs.cells import AUDITED
from rigs.megatron.options import ADAM, UNPATCHED
from rigs.mistakes.schedules import schedule_of
from rigs.mistakes.weights import log_probabilities, put, reference_in

from megapatch import audit
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

STEPS = 10_000
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


def soak(rank, world_size, steps):
    torch.set_num_threads(1)
    init_parallel()
    model = tiny_gpt(layers=1, **OPTIONS)
    schedule = schedule_of(model)
    for step in range(steps):
        for between in (evaluation, reference, load, offload):
            if step % EVERY[between.__name__] == 0:
                between(model, step)
        model.train_step(step, num_microbatches=1)
        schedule.step(1)
    return running_audit().ledger.step, [str(each) for each in (*audit.findings(), *audit.notes())]


@pytest.mark.nightly
def test_nothing_is_found_in_a_long_run():
    env = {**UNPATCHED, **AUDITED, "MEGAPATCH_AUDIT_EVERY": "50"}
    ranks = run_ranks(soak, 2, STEPS, env=env, timeout=1800.0)  # 4 minutes on an idle machine
    assert ranks == [(STEPS, [])] * 2
