"""SkyRL's patches keep the contract on its own code: one release of the old package and one of the new. Checkouts,
which have all the defects, come before wheels."""

import asyncio
import importlib
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rigs.contract import ALONE, check_contract, check_family
from rigs.megatron.gathers import OVERLAP, Collectives
from rigs.skyrl.engines import BroadcastFailed, Engines, trainer_for
from rigs.skyrl.releases import RELEASES, Release, find_skyrl, needs_skyrl
from rigs.skyrl.save import Saves
from rigs.skyrl.worker import GPT, samples, worker_for

from megapatch.patches import skyrl
from megapatch.patches._catalogue import of_family
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = needs_skyrl
PATCHES = of_family("skyrl")  # which imports the modules that `skyrl` has below


def here():
    return Release("this", os.environ["SKYRL_RELEASE"])


def failed_pause():
    engines = Engines(here(), OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        asyncio.run(engines.client.pause_generation())
    assert not engines.marked


def sync():
    try:
        module = here().module_of(skyrl.weight_sync_pause.MODULES)
    except ModuleNotFoundError:
        return  # skyrl-train of PyPI
    engines = Engines(here())
    dispatch = object.__new__(module.WorkerDispatch)
    dispatch.colocate_all, dispatch._inference_engine_client = False, engines.client
    dispatch.broadcast_to_inference_engines = lambda client: (
        engines.begin_broadcast(),
        engines.finish_broadcast(),
    )
    asyncio.run(dispatch.save_weights_for_sampler())
    assert not engines.told()["seen mixed"]


def failed_sync_in_train():
    module = here().module_of(skyrl.async_trainer_resume.MODULES)
    if not hasattr(module.FullyAsyncRayPPOTrainer, skyrl.async_trainer_resume.SYNC):
        return  # later ones leave it to the dispatch
    engines = Engines(here())
    engines.failing_broadcasts = (2,)
    with pytest.raises(BroadcastFailed):
        asyncio.run(trainer_for(module, engines).train())
    assert engines.serving == [True, True]


def scaled_loss():
    config = SimpleNamespace(grad_scale_func=None, finalize_model_grads_func=None)
    optimizer = SimpleNamespace(scale_loss=lambda loss: 1024 * loss)
    here().wrapped([SimpleNamespace(config=config)], optimizer)
    assert config.grad_scale_func is optimizer.scale_loss


def second_stage():
    strategy = object.__new__(here().module_of(skyrl.pipeline_seed.MODULES).MegatronStrategy)
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    stage = {"model_parallel_is_initialized": lambda: True, "get_pipeline_model_parallel_rank": lambda: 1}
    with (
        mock.patch.multiple(parallel_state, **stage),
        mock.patch.object(torch.cuda, "device_count", return_value=0),
    ):
        strategy.set_seed(42)
    assert torch.initial_seed() == 142


def two_calls():
    module = here().module_of(skyrl.accumulate_forward_backward.MODULES)
    if "forward_backward" not in vars(module.MegatronPolicyWorkerBase):
        return  # skyrl-train of PyPI
    init_parallel()
    norms = []
    for cut in ((2,), (1, 1)):
        worker = worker_for(here(), tiny_gpt(**GPT))
        batch = samples(here(), 0, 2)
        for index, size in enumerate(cut):
            worker.forward_backward(batch[index : index + size])
        norms.append(worker.optim_step())
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def saved_after_a_step():
    init_parallel()
    model = tiny_gpt(**OVERLAP)
    model.train_step(0)
    with Collectives().counted() as collectives:
        Saves(here())(model)
    assert collectives.gathers


def restored_slot():
    try:
        module = importlib.import_module(skyrl.adapters_own_state.MODULE)
    except ModuleNotFoundError:
        return  # before 0.3.0
    parameter, moment = torch.zeros(1), torch.zeros(1)
    optimizer = SimpleNamespace(
        shard_fp32_from_float16_groups=[],
        shard_fp32_groups=[[parameter]],
        optimizer=SimpleNamespace(state={parameter: {"exp_avg": moment}}, param_groups=[]),
    )
    store = module.AdapterStore()
    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *ignored: tensor):
        slot = store._allocate_empty_slot([], optimizer)
    store._snapshot(slot, [], optimizer)
    moment.fill_(1.0)
    store._restore(slot, [], optimizer)
    assert moment.item() == 0.0


SCENARIOS = {
    skyrl.accumulate_forward_backward.PATCH: two_calls,
    skyrl.adapters_own_state.PATCH: restored_slot,
    skyrl.async_trainer_resume.PATCH: failed_sync_in_train,
    skyrl.gathered_when_read.PATCH: saved_after_a_step,
    skyrl.grad_scale.PATCH: scaled_loss,
    skyrl.pause_rollback.PATCH: failed_pause,
    skyrl.pipeline_seed.PATCH: second_stage,
    skyrl.weight_sync_pause.PATCH: sync,
}


def first(releases):
    """One that has every defect, if there is one: a checkout."""
    return sorted(releases, key=lambda one: not one.name.startswith("checkout"))[:1]


CHOSEN = [
    *first(one for one in RELEASES if one.old and one.name != "skyrl_train-0.2.0"),
    *first(one for one in RELEASES if not one.old and one.name not in ("skyrl-0.3.0", "skyrl-0.4.0")),
]


@pytest.mark.every_patch("skyrl")
@pytest.mark.parametrize("release", CHOSEN, ids=lambda one: one.name)
def test_the_contract_is_kept(release):
    check_family(PATCHES, SCENARIOS, find_skyrl, SKYRL_RELEASE=release.folder)


WITH_ADAPTERS = [one for one in RELEASES if one.has("workers/megatron/adapter_store")][-1:]


@pytest.mark.every_patch("skyrl")
@pytest.mark.parametrize("release", WITH_ADAPTERS, ids=lambda one: one.name)
def test_the_contract_is_kept_where_there_are_adapters(release):
    env = {**ALONE, "SKYRL_RELEASE": release.folder}
    check_contract({skyrl.adapters_own_state.PATCH: restored_slot}, setup=find_skyrl, env=env)
