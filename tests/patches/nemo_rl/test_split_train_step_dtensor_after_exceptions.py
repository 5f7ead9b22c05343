"""nemo_rl.split-train-step-dtensor: exceptions in a step of NeMo-RL's own DTensor workers, and calls out of order.

At 2 ranks on CPU. Without a checkout it is our imitation of the first worker.
"""

import contextlib
from functools import partial

import pytest
import torch
from rigs.cells import once, run_cells
from rigs.nemo_rl.dtensor import (
    SLICES,
    WORKERS,
    Interrupted,
    assert_close,
    differences,
    find_workers,
    parameters,
    trained,
    worker_for,
)
from rigs.nemo_rl.steps import SIZE, in_slices, slices, whole
from rigs.nemo_rl.worker import batch, nll_loss

from megapatch.errors import MisuseError

pytestmark = pytest.mark.thorough

RANKS = 2


class RaisingLoss:
    """Raises at a microbatch; the rest is the loss's own."""

    def __init__(self, loss, at):
        self.loss, self.left = loss, at

    def __getattr__(self, name):
        return getattr(self.loss, name)

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise Interrupted
        return self.loss(*args, **kwargs)


def fault_in_loss(worker, cut):
    worker.begin_train_step(RaisingLoss(nll_loss(), 3), gbs=SIZE * RANKS)
    for data in slices(worker, 7, cut):
        worker.train_microbatch(data)


def fault_in_layer(worker, cut):
    worker.begin_train_step(nll_loss(), gbs=SIZE * RANKS)
    first, *rest = slices(worker, 7, cut)
    worker.train_microbatch(first)
    layer = worker.model.model.layers[1]
    layer.raises = True
    try:
        worker.train_microbatch(rest[0])
    finally:
        layer.raises = False


def fault_in_data(worker, cut):
    worker.begin_train_step(nll_loss(), gbs=SIZE * RANKS)
    first, second = slices(worker, 7, cut)
    worker.train_microbatch(first)
    del second["input_lengths"]
    second["input_ids"] = second["input_ids"][:, :5]  # dimensions that are not alike: train()'s own assertion
    worker.train_microbatch(second)


def fault_in_optimizer(worker, cut):
    def raises(*ignored):
        raise Interrupted

    handle = worker.optimizer.register_step_pre_hook(raises)
    try:
        in_slices(cut)(worker, 7, nll_loss())
    finally:
        handle.remove()


def fault_between(worker, cut):
    worker.begin_train_step(nll_loss(), gbs=SIZE * RANKS)
    worker.train_microbatch(next(slices(worker, 7, cut)))
    worker.abort_train_step()
    raise Interrupted


FAULTS = (fault_in_loss, fault_in_layer, fault_in_data, fault_in_optimizer, fault_between)


def after_faults(rank, world_size):
    cut = SLICES["two"]
    with contextlib.redirect_stdout(None):
        for name in WORKERS:
            expected = once(lambda name=name: trained(worker_for(name), "nll", whole))
            for fault in FAULTS:
                for how, take_step in {"in slices": in_slices(cut), "train()": whole}.items():
                    yield (name, fault.__name__, how), partial(after_fault, expected, name, fault, cut, take_step)
            yield (name, "misuse"), partial(misuses, name)
            yield (name, "nothing counts"), partial(nothing_counts, name)


def after_fault(expected, name, fault, cut, take_step):
    reference = expected()
    made = worker_for(name)
    attributes = dict(vars(made))
    with pytest.raises((Interrupted, AssertionError)):
        fault(made, cut)
    made.abort_train_step()  # does nothing any more
    changed = {key for key, value in vars(made).items() if attributes.get(key) is not value}
    assert changed <= {"_train_step_state"} and made._train_step_state is None
    assert all(one.grad is None for one in made.model.parameters())
    return differences(trained(made, "nll", take_step), reference)


def misuses(name):
    """Return the error message of each wrong call."""
    found, worker = {}, worker_for(name)

    def attempt(what, function, *args, **kwargs):
        with pytest.raises(MisuseError) as raised:
            function(*args, **kwargs)
        found[what] = str(raised.value)

    data = batch(0, 2, worker.rank)
    attempt("microbatch without", worker.train_microbatch, data)
    attempt("finish without", worker.finish_train_step)
    worker.begin_train_step(nll_loss(), gbs=16)
    attempt("begin twice", worker.begin_train_step, nll_loss(), gbs=16)
    attempt("train() within", worker.train, data, nll_loss())
    attempt("a checkpoint within", worker.save_checkpoint, "nowhere")
    attempt("finish of nothing", worker.finish_train_step)
    worker.begin_train_step(nll_loss(), gbs=16)
    attempt("an empty rank", worker.train_microbatch, data.slice(0, 2 * worker.rank))
    worker.begin_train_step(nll_loss(), gbs=16)
    del data["sample_mask"]
    attempt("no sample_mask", worker.train_microbatch, data)
    positive = nll_loss()
    positive.positive_example_nll_weight = 0.1
    attempt("positive", worker.begin_train_step, positive, gbs=16)
    packing = worker_for(name, settings={"sequence_packing": {"enabled": True, "train_mb_tokens": 24}})
    packing.begin_train_step(nll_loss(), gbs=16)
    attempt("no bins", packing.train_microbatch, batch(0, 2, worker.rank))
    made = worker_for(name)
    before, train = parameters(made), made.train
    losing = {"gradients dropped": lambda *args, **kwargs: (made.model.zero_grad(), train(*args, **kwargs))[1]}
    for what, other in {**losing, "no optimizer step": lambda *args, **kwargs: {}}.items():
        made.begin_train_step(nll_loss(), gbs=16)
        made.train_microbatch(batch(0, 2, made.rank))
        made.train = other
        attempt(what, made.finish_train_step)
        del made.train
    assert all(torch.equal(value, before[name]) for name, value in parameters(made).items())
    return found


def nothing_counts(name):
    """A step in which nothing counts: what changes, and the gradient norm."""
    made = worker_for(name)
    before, rate = parameters(made), made.optimizer.param_groups[0]["lr"]
    data = batch(0, SIZE, made.rank)
    data["sample_mask"] = torch.zeros_like(data["sample_mask"])
    made.begin_train_step(nll_loss(), gbs=SIZE * RANKS)
    made.train_microbatch(data)
    told = made.finish_train_step()
    same = all(torch.equal(value, before[name]) for name, value in parameters(made).items())
    return same, made.optimizer.param_groups[0]["lr"] / rate, float(told["grad_norm"]), told["all_mb_metrics"]


@pytest.fixture(scope="module")
def faulty_ranks():
    return run_cells(after_faults, RANKS, setup=find_workers, timeout=580)


@pytest.mark.parametrize("how", ["in slices", "train()"])
@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS])
@pytest.mark.parametrize("worker", WORKERS)
def test_after_an_exception_the_next_step_is_a_fresh_one(faulty_ranks, worker, fault, how):
    assert_close(faulty_ranks, worker, fault, how)


@pytest.mark.parametrize("worker", WORKERS)
def test_says_what_is_called_wrongly(faulty_ranks, worker):
    expected = {
        "microbatch without": "no train step open",
        "finish without": "no train step open",
        "begin twice": "a train step is already open",
        "train() within": "train() would zero the gradients of the open train step",
        "a checkpoint within": "save_checkpoint() would leave out the gradients",
        "finish of nothing": "the step had no train_microbatch()",
        "an empty rank": "a rank has no samples in this call",
        "no sample_mask": "the data has no sample_mask",
        "positive": "positive_example_nll_weight",
        "no bins": "expected what shard_by_batch_size() makes",
        "gradients dropped": "train() dropped the gradients before the optimizer's step",
        "no optimizer step": "train() without data did not step the optimizer",
    }
    for found in faulty_ranks:
        said = found[worker, "misuse"]
        assert said.keys() == expected.keys()
        assert [what for what, text in expected.items() if text not in said[what]] == []


@pytest.mark.parametrize("worker", WORKERS)
def test_a_step_in_which_nothing_counts_leaves_parameters(faulty_ranks, worker):
    for found in faulty_ranks:
        assert found[worker, "nothing counts"] == (True, 0.5, 0.0, {})
