"""AReaL's patches keep the contract on its own code: the newest release."""

import importlib
from unittest import mock

import pytest
import torch
from rigs.areal.engine import (
    BOTH,
    CHECKPOINTER,
    ENGINE,
    GRADS,
    RELEASES,
    engine_of,
    evaluate,
    find_areal,
    needs_areal,
    train,
)
from rigs.areal.updates import Servers, checkpoint, update
from rigs.contract import check_family
from rigs.megatron.gathers import Collectives
from rigs.megatron.options import attempt

from megapatch.patches._catalogue import of_family
from megapatch.patches.areal import (
    aux_loss_scale,
    eval_loss,
    gathered_when_read,
    load_optimizer_state,
    pipeline_seed,
    weight_sync_resume,
)

pytestmark = needs_areal


def scaled_by_megatron():
    engine, found = engine_of(GRADS, dtype="float16"), []
    config = importlib.import_module(ENGINE).get_model_config(engine.model[0])
    engine.forward_backward_batch = lambda *ignored, **also_ignored: found.append(config.grad_scale_func)
    engine.optimizer.step = lambda: (True, 0.0, None)
    train(engine, 0)
    assert found != [None]
    assert config.grad_scale_func is None


def evaluated_in_two():
    engine = engine_of(GRADS)
    assert evaluate(engine, 2) == pytest.approx(evaluate(engine, 1))


def read_after_a_step():
    engine = engine_of(BOTH)
    for read in (
        lambda engine: update(engine, Servers()),
        lambda engine: update(engine, Servers(), "disk"),
        checkpoint,
    ):
        train(engine, 0)
        with Collectives().counted() as collectives:
            read(engine)
        assert collectives.gathers


def second_stage():
    module, found = importlib.import_module(ENGINE), []
    with (
        mock.patch.object(module.tensor_parallel, "model_parallel_cuda_manual_seed", found.append),
        mock.patch.object(module.mpu, "get_pipeline_model_parallel_rank", return_value=1),
        mock.patch.object(module.MegatronEngine, "initialize"),
    ):
        engine_of()
    assert found == [0, 100]


def load_of_moments():
    """The optimizer is asked for what a load needs."""
    engine, asked = engine_of(GRADS), []
    module = importlib.import_module(CHECKPOINTER)
    engine.optimizer.sharded_state_dict = lambda state, **given: asked.append(given)
    with mock.patch.object(module, "load_dist_checkpointing", return_value={"optimizer": None}):
        attempt(engine.checkpointer.load_checkpoint, None, with_model=False, with_rng=False)
    assert [given.get("is_loading") for given in asked] == [True]


def failed_update():
    engine, servers = engine_of(GRADS), Servers("update")
    with mock.patch("torch.distributed.barrier"):
        assert attempt(update, engine, servers) == ("ConnectionError", "update")
    assert servers.calls == ["pause", "update", "continue"][: None if torch.distributed.get_rank() == 0 else 0]


SCENARIOS = {
    aux_loss_scale.PATCH: scaled_by_megatron,
    eval_loss.PATCH: evaluated_in_two,
    gathered_when_read.PATCH: read_after_a_step,
    load_optimizer_state.PATCH: load_of_moments,
    pipeline_seed.PATCH: second_stage,
    weight_sync_resume.PATCH: failed_update,
}


@pytest.mark.every_patch("areal")
def test_the_contract_is_kept():
    check_family(of_family("areal"), SCENARIOS, find_areal, AREAL_RELEASE=RELEASES[-1].folder)
