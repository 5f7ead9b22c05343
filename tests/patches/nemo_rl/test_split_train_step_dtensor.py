"""nemo_rl.split-train-step-dtensor: the four methods on NeMo-RL's own DTensor workers, at 2 ranks on CPU.

A step in slices against the same worker's train() on all of them at once: what it tells, by name, and parameters.
Without a checkout it is our imitation of the first worker.
"""

import contextlib
from functools import partial

import pytest
import torch
from rigs.cells import cells_of, once
from rigs.imported import run_with_megatron
from rigs.nemo_rl.dtensor import (
    CLASSES,
    SLICES,
    WORKERS,
    Interrupted,
    assert_close,
    differences,
    find_workers,
    in_bins,
    module_of,
    parameters,
    trained,
    worker_for,
)
from rigs.nemo_rl.steps import SIZE, in_slices, slices, whole
from rigs.nemo_rl.worker import CHECKOUT, batch, nll_loss

from megapatch.errors import MisuseError
from megapatch.patches._ray_actors import class_of

pytestmark = pytest.mark.thorough

RANKS = 2
PASSES = {"ranks apart": 3 + 3, "odd": 3 + 1 + 2}  # of each rank; else as many as train() makes
CASES = {  # loss, and options of the worker; the first ones clip
    "nll": ("nll", {}),
    "policy gradient": ("policy gradient", {}),
    "by sequences": ("by sequences", {}),
    "adam": ("policy gradient", {"optimizer": "adam", "max_grad_norm": 100.0}),
}
BINS = {"dynamic_batching": {}, "sequence_packing": {"train_mb_tokens": 24}}
BIN_SLICES = {"two": (4, 4), "ranks apart": ((2, 7), (6, 1))}
TOKENS = 24  # in a bin
# The imitation's losses cannot have a microbatch in which nothing counts, and ranks are given such to be alike.
CELLS = [(case, cut) for case in CASES for cut in SLICES if CHECKOUT or case == "nll" or cut == "uneven"]
# By sequences it depends on which samples share a microbatch: the sum of all products of one sample's ratio and
# another one's mask.
BY_MICROBATCH = ("sampling_importance_ratio",)


def logprobs(worker):
    """Of other samples, as a controller asks for them while a step is open."""
    worker.get_logprobs(batch(99, 4, worker.rank))


def counted(take_step, passes):
    """Take a step, and see that the model makes that many passes in it, and keeps no gradient."""

    def step(worker, *args):
        before = worker.model.calls
        told = take_step(worker, *args)
        assert worker.model.calls - before == passes
        assert all(one.grad is None for one in worker.model.parameters())
        return told

    return step


def compared(rank, world_size):
    with contextlib.redirect_stdout(None):
        for name in WORKERS:
            for case, (loss, options) in CASES.items():
                expected = once(run, name, loss, whole, **options)
                for cut in (cut for of, cut in CELLS if of == case):
                    take_step = counted(in_slices(SLICES[cut]), PASSES.get(cut, 4))
                    without = BY_MICROBATCH if cut == "odd" else ()
                    yield (name, case, cut), partial(cell, expected, name, loss, take_step, without, **options)
            expected = once(run, name, "nll", whole)
            take_step = in_slices(SLICES["uneven"], between=logprobs)
            yield (name, "logprobs between"), partial(cell, expected, name, "nll", take_step)
            in_cp, take_step = once(run, name, "nll", whole, cp=2), in_slices(SLICES["uneven"])
            yield (name, "context parallel"), partial(cell, in_cp, name, "nll", take_step, cp=2)
            in_tp = once(run, name, "nll", whole, tp=2)
            yield (name, "tensor parallel"), partial(cell, in_tp, name, "nll", take_step, tp=2)
            for kind, settings in BINS.items():
                bins = partial(in_bins, kind=kind, tokens=TOKENS)
                settings = {kind: {"enabled": True, **settings}}
                for cut, sizes in BIN_SLICES.items():  # train() not in bins: the result is the same
                    take_step = in_slices(sizes, bins)
                    yield (name, kind, cut), partial(cell, expected, name, "nll", take_step, settings=settings)
            for fault in FAULTS:
                for how, take_step in {"in slices": in_slices(SLICES["two"]), "train()": whole}.items():
                    yield (name, fault.__name__, how), partial(after_fault, expected, name, fault, take_step)
            yield (name, "misuse"), partial(misuses, name)
            yield (name, "nothing counts"), partial(nothing_counts, name)


def run(name, loss, take_step, **options):
    return trained(worker_for(name, **options), loss, take_step)


def cell(expected, name, loss, take_step, without=(), **options):
    reference = expected()
    return differences(run(name, loss, take_step, **options), reference, without)


ranks = cells_of(compared, RANKS, setup=find_workers)


@pytest.mark.parametrize(("case", "cut"), CELLS)
@pytest.mark.parametrize("worker", WORKERS)
def test_a_step_in_slices_is_that_of_train(ranks, worker, case, cut):
    assert_close(ranks, worker, case, cut)


@pytest.mark.parametrize("case", ["logprobs between", "context parallel", "tensor parallel"])
@pytest.mark.parametrize("worker", WORKERS)
def test_so_is_one_with(ranks, worker, case):
    assert_close(ranks, worker, case)


@pytest.mark.parametrize("cut", BIN_SLICES)
@pytest.mark.parametrize("kind", BINS)
@pytest.mark.parametrize("worker", WORKERS)
def test_and_one_of_samples_in_bins(ranks, worker, kind, cut):
    assert_close(ranks, worker, kind, cut)


# ---------------------------------------------------------------- exceptions, and calls out of order
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


def fault_in_loss(worker):
    worker.begin_train_step(RaisingLoss(nll_loss(), 3), gbs=SIZE * RANKS)
    for data in slices(worker, 7, SLICES["two"]):
        worker.train_microbatch(data)


def fault_in_layer(worker):
    worker.begin_train_step(nll_loss(), gbs=SIZE * RANKS)
    first, *rest = slices(worker, 7, SLICES["two"])
    worker.train_microbatch(first)
    layer = worker.model.model.layers[1]
    layer.raises = True
    try:
        worker.train_microbatch(rest[0])
    finally:
        layer.raises = False


def fault_in_optimizer(worker):
    def raises(*ignored):
        raise Interrupted

    handle = worker.optimizer.register_step_pre_hook(raises)
    try:
        in_slices(SLICES["two"])(worker, 7, nll_loss())
    finally:
        handle.remove()


def fault_between(worker):
    worker.begin_train_step(nll_loss(), gbs=SIZE * RANKS)
    worker.train_microbatch(next(slices(worker, 7, SLICES["two"])))
    worker.abort_train_step()
    raise Interrupted


FAULTS = (fault_in_loss, fault_in_layer, fault_in_optimizer, fault_between)


def after_fault(expected, name, fault, take_step):
    reference = expected()
    made = worker_for(name)
    attributes = dict(vars(made))
    with pytest.raises(Interrupted):
        fault(made)
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
    worker.begin_train_step(nll_loss(), gbs=16)
    attempt("train() within", worker.train, data, nll_loss())
    attempt("a checkpoint within", worker.save_checkpoint, "nowhere")
    attempt("finish of nothing", worker.finish_train_step)
    worker.begin_train_step(nll_loss(), gbs=16)
    attempt("an empty rank", worker.train_microbatch, data.slice(0, 2 * worker.rank))
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


@pytest.mark.parametrize("how", ["in slices", "train()"])
@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS])
@pytest.mark.parametrize("worker", WORKERS)
def test_after_an_exception_the_next_step_is_a_fresh_one(ranks, worker, fault, how):
    assert_close(ranks, worker, fault, how)


@pytest.mark.parametrize("worker", WORKERS)
def test_says_what_is_called_wrongly(ranks, worker):
    expected = {
        "train() within": "train() would zero the gradients of the open train step",
        "a checkpoint within": "save_checkpoint() would leave out the gradients",
        "finish of nothing": "the step had no train_microbatch()",
        "an empty rank": "a rank has no samples in this call",
        "no bins": "expected what shard_by_batch_size() makes",
        "gradients dropped": "train() dropped the gradients before the optimizer's step",
        "no optimizer step": "train() without data did not step the optimizer",
    }
    for found in ranks:
        said = found[worker, "misuse"]
        assert said.keys() == expected.keys()
        assert [what for what, text in expected.items() if text not in said[what]] == []


@pytest.mark.parametrize("worker", WORKERS)
def test_a_step_in_which_nothing_counts_leaves_parameters(ranks, worker):
    for found in ranks:
        assert found[worker, "nothing counts"] == (True, 0.5, 0.0, {})


# ---------------------------------------------------------------- the classes
METHODS = ("begin_train_step", "train_microbatch", "finish_train_step", "abort_train_step")


def methods(rank, world_size):
    """Of each worker, and of its actor class: which of the four it has."""
    found = {}
    for name in WORKERS:
        module = module_of(name)
        worker = getattr(module, CLASSES[name])
        actor = getattr(module, CLASSES[name].removesuffix("Impl"))
        if isinstance(actor, type):  # the imitation's, without Ray
            known = dir(actor)
        else:
            known = actor.__ray_metadata__.method_meta.methods
            assert issubclass(class_of(actor), worker)
        found[name] = [[one for one in METHODS if hasattr(worker, one)], [one for one in METHODS if one in known]]
    return found


def test_without_the_patch_there_is_train_alone():
    (found,) = run_with_megatron(methods, 1, setup=find_workers, env={"MEGAPATCH_DISABLE": "*"})
    assert found == {name: [[], []] for name in WORKERS}


def test_the_actor_class_has_them_too():
    (found,) = run_with_megatron(methods, 1, setup=find_workers)
    assert found == {name: [list(METHODS), list(METHODS)] for name in WORKERS}
