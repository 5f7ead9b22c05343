"""NeMo-RL's patches keep the contract, on its own code or on our imitation."""

import asyncio
import contextlib
import importlib

import pytest
from patches.nemo_rl.test_gathered_when_read import refitting_worker, sent_by
from patches.nemo_rl.test_train_after_exception import failing_in_loss
from rigs.contract import ALONE, check_contract
from rigs.megatron.gathers import OVERLAP
from rigs.megatron.options import BOTH, Interrupted, attempt
from rigs.nemo_rl.dtensor import SECOND, WORKERS, find_workers
from rigs.nemo_rl.worker import GPT, SHAPES, batch, nll_loss, worker_for
from rigs.renames import assert_renames_are_seen

from megapatch import Patch
from megapatch._python import finding
from megapatch.patches._catalogue import of_family
from megapatch.patches.nemo_rl import (
    abort_resets_rerun,
    forward_pre_hook_after_split,
    gathered_when_read,
    hooks_without_overlap,
    open_step_guard,
    reference_model_rollback,
    split_train_step,
    split_train_step_dtensor,
    split_train_step_policy,
    sync_weights_version,
    train_after_exception,
)
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = pytest.mark.thorough


def loadable(patch):
    """Without sites in what needs Automodel, where that is not here."""
    sites = [one for one in patch.sites if SECOND in WORKERS or not one.module.endswith(SECOND)]
    return Patch(patch.name, patch.doc, patch.upstream, tuple(sites), patch.changes_numbers)


def worker(**options):
    init_parallel()
    return worker_for(tiny_gpt(**GPT, **options))


def one_step(worker):
    worker.begin_train_step(nll_loss(), gbs=4)
    for begin in (0, 2):
        worker.train_microbatch(batch(0, 4).slice(begin, begin + 2))
    return worker.finish_train_step()


def slices():
    assert one_step(worker())["grad_norm"] > 0


def hooks_after_a_step():
    one = worker(**BOTH)
    if hasattr(one, "begin_train_step"):
        one_step(one)
        assert one.model.remove_forward_pre_hook_handles


def raises(*args, **kwargs):
    raise Interrupted


def step_after_an_aborted_one():
    one = worker()
    if not hasattr(one, "begin_train_step"):
        return
    loss = nll_loss()
    loss.__class__ = type("Raising", (type(loss),), {"__call__": raises})
    one.begin_train_step(loss)
    with contextlib.suppress(Interrupted):
        one.train_microbatch(batch(0, 4))
    one.abort_train_step()
    one_step(one)


def logprobs_in_a_step():
    one = worker()
    one._train_step_state = {}
    with pytest.raises(RuntimeError, match="would free the gradients"):
        one.prepare_for_lp_inference()


def there(module):
    """The module, or None: releases differ, and our imitation has not all."""
    return importlib.import_module(module) if finding.find_module(module) else None


def swap_that_raises():
    one = worker()
    name, own = next(iter(one.reference_state_dict.items()))
    one.reference_state_dict[name] = own + 1
    with contextlib.suppress(Interrupted), one.use_reference_model():
        raise Interrupted
    assert one.model.state_dict()[name].equal(own)


def policy_of_slices():
    from rigs.nemo_rl.policy import find_policies, policy_for

    if there("nemo_rl.models.policy.lm_policy"):
        find_policies()
        init_parallel()
        policy = policy_for(tiny_gpt(**GPT))
        if not hasattr(policy, "begin_train_step") and there("nemo_rl.models.policy.tq_policy"):
            policy = policy_for(tiny_gpt(**GPT), "TQPolicy")  # main's other one has none
        policy.worker_group.mine.begin_train_step = lambda **ignored: None
        policy.begin_train_step(None)


def dtensor_worker():
    if module := there("nemo_rl.models.policy.workers.dtensor_policy_worker"):
        with pytest.raises(RuntimeError, match="no train step open"):
            object.__new__(module.DTensorPolicyWorkerImpl).finish_train_step()


def train_again():
    init_parallel()
    worker = worker_for(tiny_gpt(**GPT))
    loss = nll_loss()
    with failing_in_loss(worker, loss):
        assert attempt(worker.train, batch(0, 4), loss)[0] == "Interrupted"
    worker.train(batch(0, 4), nll_loss())
    timer = importlib.import_module("nemo_rl.utils.timer").Timer()
    for _ in range(2):
        timer.start("train")


def refit_after_a_step():
    init_parallel()
    worker = refitting_worker(OVERLAP)
    if not hasattr(worker, "nccl_reshard_refit"):
        return
    worker.train(batch(0, 4), nll_loss())
    sent_by(worker)
    assert all(group.param_gather_dispatched for group in worker.model.bucket_groups)


def hooks_of_a_model():
    init_parallel()
    model = tiny_gpt(hooks=False)
    setup = importlib.import_module("megatron.bridge.training.setup")
    setup._update_model_config_funcs(model.chunks, model.config, model.ddp_config, model.optimizer)
    assert model.config.no_sync_func is model.config.grad_sync_func is None


def sync_with_version():
    if (module := there("nemo_rl.weight_sync.interfaces")) is None:
        return  # up to 0.6.0

    class Synchronizer(module.WeightSynchronizer):
        is_stale = init_communicator = shutdown = mark_stale = None

        def sync_weights(self, *, timer=None, kv_scales=None):
            return "synced"

    async def controller():
        return await Synchronizer().sync_weights(3)

    assert asyncio.run(controller()) == "synced"


SCENARIOS = {
    split_train_step_policy.PATCH: policy_of_slices,
    split_train_step.PATCH: slices,
    split_train_step_dtensor.PATCH: dtensor_worker,
    forward_pre_hook_after_split.PATCH: hooks_after_a_step,
    abort_resets_rerun.PATCH: step_after_an_aborted_one,
    open_step_guard.PATCH: logprobs_in_a_step,
    reference_model_rollback.PATCH: swap_that_raises,
    gathered_when_read.PATCH: refit_after_a_step,
    hooks_without_overlap.PATCH: hooks_of_a_model,
    sync_weights_version.PATCH: sync_with_version,
    train_after_exception.PATCH: train_again,
}


OF_MAIN = {forward_pre_hook_after_split.PATCH, abort_resets_rerun.PATCH}
"""The others are held to it on a release's shape, where there is no checkout with all it has."""


def in_shape(shape):
    """Return options of `run_with_megatron`."""
    return {"setup": find_workers, "env": {**ALONE, "NEMO_RL_SHAPE": shape}}


@pytest.mark.every_patch("nemo_rl")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_renamed_name_is_not_taken_for_a_repair(shape):
    assert_renames_are_seen("nemo_rl", at_least=30, **in_shape(shape))


@pytest.mark.every_patch("nemo_rl")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_contract_is_kept(shape):
    assert SCENARIOS.keys() == set(of_family("nemo_rl"))
    chosen = {"main": OF_MAIN, "release": SCENARIOS.keys() - OF_MAIN}.get(shape, SCENARIOS.keys())
    check_contract({loadable(patch): SCENARIOS[patch] for patch in chosen}, **in_shape(shape))
