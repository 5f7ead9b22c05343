"""nemo_rl.open-step-guard: what would lose the gradients of an open step is refused, and nothing else."""

import contextlib

import pytest
from rigs.imported import run_with_megatron
from rigs.nemo_rl.steps import SIZE, assert_no_difference, differences, in_slices, set_up, trained_gpt
from rigs.nemo_rl.worker import LENGTH, SHAPES, batch, find_nemo_rl

from megapatch.testing import init_parallel

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
    seen = []

    def prepare(worker):
        (buffer,) = worker.model.buffers
        for keep in (True, False):
            worker.prepare_for_lp_inference(keep_train_buffers=keep)
            seen.append(buffer.grad_data.storage().size() > 0)
        worker.offload_before_refit()
        worker.offload_after_refit()
        worker.prepare_for_training()

    with contextlib.redirect_stdout(None):
        init_parallel()
        got, expected = (
            trained_gpt({}, "nll", in_slices((8,)), **options) for options in ({"before": prepare}, {})
        )
        return seen, differences(got, expected)["parameters"]


@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_between_steps_all_of_it_works(shape):
    for seen, difference in run_with_megatron(between_steps, 2, setup=find_nemo_rl, env={"NEMO_RL_SHAPE": shape}):
        assert seen == [True, False]
        assert difference < 1e-6
