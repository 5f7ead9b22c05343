"""nemo_rl.open-step-guard: what would lose the gradients of an open step is refused, and nothing else."""

import contextlib
from unittest import mock

import pytest
from rigs.imported import run_with_megatron
from rigs.nemo_rl.steps import LOSSES, SIZE, assert_no_difference, differences, in_slices, set_up, trained_gpt
from rigs.nemo_rl.worker import GPT, LENGTH, SHAPES, batch, find_nemo_rl, worker_for

from megapatch.testing import init_parallel, tiny_gpt

pytestmark = pytest.mark.thorough

REFUSED = {
    "prepare_for_lp_inference": (),
    "offload_before_refit": (),
    "offload_after_refit": (),
    "train": (None, None),
    "save_checkpoint": ("nowhere",),
}


def between_slices(detour):
    """A step in two slices with something between them."""

    def step_with_detour(worker, step, loss):
        data = batch(step, SIZE)
        worker.begin_train_step(loss, gbs=SIZE * worker.dp_size)
        worker.train_microbatch(data.slice(0, 4))
        detour(worker, data)
        worker.prepare_for_training()
        worker.train_microbatch(data.slice(4, SIZE))
        return worker.finish_train_step()

    return step_with_detour


def logprobs(worker, data):
    """As main's controller does before each slice."""
    worker.prepare_for_lp_inference(keep_train_buffers=True)
    assert worker.get_logprobs(data=data)["logprobs"].shape == (SIZE, LENGTH)
    assert worker.get_reference_policy_logprobs(data=data)["reference_logprobs"].shape == (SIZE, LENGTH)


def refused(worker, data):
    for name, arguments in REFUSED.items():
        with pytest.raises(
            RuntimeError, match=rf"{name}\(\) would .* the open train step: .*abort_train_step\(\)"
        ):
            getattr(worker, name)(*arguments)
    with (
        sharing_buffers(worker),
        pytest.raises(RuntimeError, match=r"use_reference_model\(\) would overwrite"),
        worker.use_reference_model(),
    ):
        raise AssertionError("not refused")


def sharing_buffers(worker):
    """Let weights and gradients share a buffer, in NeMo-RL's eyes."""
    return mock.patch.object(worker, "_uses_mxfp8_overlap_shared_param_buffer", create=True)


def freeing(worker, data):
    worker.prepare_for_lp_inference()


def compared(rank, world_size):
    found = {}
    with contextlib.redirect_stdout(None):
        for layout, options in set_up("dp2", "dp2, distributed optimizer, both"):
            expected = trained_gpt(options, "policy gradient", in_slices((4, 4)))
            for detour in (logprobs, refused):
                got = trained_gpt(options, "policy gradient", between_slices(detour))
                found[layout, detour.__name__] = differences(got, expected)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_with_a_detour_is_that_without(shape):
    ranks = run_with_megatron(compared, 2, setup=find_nemo_rl, env={"NEMO_RL_SHAPE": shape})
    assert_no_difference(ranks, cells=4, limit=1e-6)


def without_guard(rank, world_size):
    with contextlib.redirect_stdout(None):
        init_parallel()
        expected = trained_gpt({}, "nll", in_slices((4, 4)))
        return differences(trained_gpt({}, "nll", between_slices(freeing)), expected)["grad_norm"]


@pytest.mark.parametrize("shape", SHAPES)
def test_without_the_patch_gradients_of_earlier_slices_are_lost_silently(shape):
    env = {"NEMO_RL_SHAPE": shape, "MEGAPATCH_DISABLE": "nemo_rl.open-step-guard"}
    for difference in run_with_megatron(without_guard, 2, setup=find_nemo_rl, env=env):
        assert difference > 0.1


def between_steps(rank, world_size):
    """Calls that an open step refuses work without one, gradients being freed, and the next step is right."""
    with contextlib.redirect_stdout(None):
        init_parallel()
        model = tiny_gpt(**GPT)
        worker = worker_for(model)
        (buffer,) = worker.model.buffers
        seen = []
        for keep in (True, False):
            worker.prepare_for_lp_inference(keep_train_buffers=keep)
            seen.append(buffer.grad_data.storage().size() > 0)
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.prepare_for_training()
        with sharing_buffers(worker), worker.use_reference_model():
            pass
        before = [in_slices((8,))(worker, 0, LOSSES["nll"]())]
        model.gather_parameters()
        return seen, differences((before, model.parameters()), trained_once())["parameters"]


def trained_once():
    model = tiny_gpt(**GPT)
    told = [in_slices((8,))(worker_for(model), 0, LOSSES["nll"]())]
    model.gather_parameters()
    return told, model.parameters()


@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_between_steps_all_of_it_works(shape):
    for seen, difference in run_with_megatron(between_steps, 2, setup=find_nemo_rl, env={"NEMO_RL_SHAPE": shape}):
        assert seen == [True, False]
        assert difference < 1e-6
