"""verl's patches keep the contract on its own code: the newest release."""

import importlib
import math
from unittest import mock

import pytest
import torch
from rigs.contract import check_family
from rigs.megatron.gathers import Collectives
from rigs.verl.engine import (
    BOTH,
    ENGINES,
    GRADS,
    batch_of,
    engine_of,
    find_verl,
    loss,
    needs_verl,
    train,
)
from rigs.verl.reads import copy, load_schedule, save, shards
from rigs.verl.runs import register
from rigs.verl.sync import Plan, blocking, sync

from megapatch.patches._catalogue import of_family
from megapatch.patches.verl import (
    gathered_when_read,
    overflow_is_skipped,
    pipeline_seed,
    schedule_after_load,
    training_hooks,
    weight_sync_resume,
)

pytestmark = needs_verl


def read_after_a_step():
    engine = engine_of(overlap=BOTH)
    for read in (copy, save, shards):
        train(engine, 0)
        with Collectives().counted() as collectives:
            read(engine)
        assert collectives.gathers


def skipped_step():
    engine = engine_of(dtype="float16")
    engine.optimizer.step = lambda: (False, None, None)
    with engine.train_mode():
        assert engine.train_batch(batch_of(0), loss())["metrics"]["grad_norm"] == math.inf
    engine.lr_scheduler_step()
    assert engine.lr_scheduler.num_steps == 0


def second_stage():
    module = importlib.import_module("verl.workers.engine.megatron.utils")
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    stage = {"model_parallel_is_initialized": lambda: True, "get_pipeline_model_parallel_rank": lambda: 1}
    with (
        mock.patch.multiple(parallel_state, **stage),
        mock.patch("megatron.core.tensor_parallel.model_parallel_cuda_manual_seed"),
    ):
        module.set_random_seed(42)
    assert torch.initial_seed() == 142


def resumed():
    engine = engine_of()
    load_schedule(engine.checkpoint_mananager, steps=5)
    assert engine.lr_scheduler.num_steps == 5


def second_call():
    register(engine_of(overlap=GRADS))


def failed_sync():
    found = sync(Plan("transfer"), blocking)
    assert found["serving"] == found["cache"] == [True, True]


SCENARIOS = {
    gathered_when_read.PATCH: read_after_a_step,
    overflow_is_skipped.PATCH: skipped_step,
    pipeline_seed.PATCH: second_stage,
    schedule_after_load.PATCH: resumed,
    training_hooks.PATCH: second_call,
    weight_sync_resume.PATCH: failed_sync,
}


@pytest.mark.every_patch("verl")
def test_the_contract_is_kept():
    check_family(of_family("verl"), SCENARIOS, find_verl, VERL_RELEASE=ENGINES[-1].folder)
