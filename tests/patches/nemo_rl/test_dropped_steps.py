"""A dropped step of a worker with a mixture of experts leaves nothing outside of gradients either."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
from patches.nemo_rl.test_split_after_exceptions import failing_in_loss
from patches.nemo_rl.test_train_after_exception import failing_in_backward
from rigs.imported import run_with_megatron
from rigs.megatron.options import Interrupted
from rigs.nemo_rl.steps import SIZE, differences, in_slices, set_up, trained_gpt, whole
from rigs.nemo_rl.worker import SHAPES, batch, find_nemo_rl, nll_loss
from rigs.step_state import ROUTERS, held, logged_by_process, raising_after

pytestmark = pytest.mark.thorough

EXPERTS = {"experts": 4, "config": ROUTERS}
SPLIT = "nemo_rl.abort-resets-rerun"
TRAIN = "nemo_rl.train-after-exception"


def after_finalize(worker, loss):
    return raising_after(worker.model.config, "finalize_model_grads_func")


def in_the_optimizer(worker, loss):
    return raising_after(worker.optimizer, "prepare_grads")


FAULTS = {
    "train": {"loss": failing_in_loss, "backward": failing_in_backward, "after finalize": after_finalize},
    "split": {"loss": failing_in_loss, "after finalize": after_finalize, "in the optimizer": in_the_optimizer},
}


def train(worker, loss):
    worker.train(batch(7, SIZE), loss, gbs=SIZE * worker.dp_size)


def split(worker, loss):
    worker.begin_train_step(loss, gbs=SIZE * worker.dp_size)
    try:
        worker.train_microbatch(batch(7, SIZE))
        worker.finish_train_step()
    finally:
        worker.abort_train_step()


def dropped(way, fault, left):
    """Return a function that makes a step, and one that is dropped; `left` gets what is held around that."""

    def before(worker):
        whole(worker, 5, nll_loss())
        if fault is None:
            return
        model = SimpleNamespace(chunks=[worker.model], optimizer=worker.optimizer)
        found = held(model)
        loss = nll_loss()
        with contextlib.suppress(Interrupted), FAULTS[way][fault](worker, loss):
            {"train": train, "split": split}[way](worker, loss)
            raise AssertionError("nothing was raised")
        left.append((found, held(model)))

    return before


def compared(rank, world_size, way):
    """By fault: the largest difference of the parameters, and what was held before and after the dropped step."""
    take_step = {"train": whole, "split": in_slices((4, 4))}[way]
    found = {}
    with contextlib.redirect_stdout(None):
        for _, options in set_up("dp2"):
            run = functools.partial(trained_gpt, {**options, **EXPERTS}, "nll", take_step)
            logged_by_process().clear()
            expected = run(before=dropped(way, None, []))
            for fault in FAULTS[way]:
                logged_by_process().clear()
                got = run(before=dropped(way, fault, left := []))
                found[fault] = differences(got, expected)["parameters"], *left[0]
    return found


@pytest.mark.parametrize("way", FAULTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_dropped_step_leaves_nothing(shape, way):
    for found in run_with_megatron(
        compared, 2, way, setup=find_nemo_rl, timeout=300, env={"NEMO_RL_SHAPE": shape}
    ):
        for fault, (difference, before, after) in found.items():
            assert difference == 0, fault
            if way == "split":
                assert after == before, fault
            else:  # the next train() zeroes the counts
                assert after[2:] == before[2:], fault
