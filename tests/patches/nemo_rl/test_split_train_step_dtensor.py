"""nemo_rl.split-train-step-dtensor: the four methods on NeMo-RL's own DTensor workers, at 2 ranks on CPU.

A step in slices against the same worker's train() on all of them at once: what it tells, by name, and parameters.
Without a checkout it is our imitation of the first worker.
"""

from __future__ import annotations

import contextlib
import functools
import math
from types import SimpleNamespace

import pytest
import torch
from rigs.nemo_dtensor import (
    CLASSES,
    WORKERS,
    Interrupted,
    find_workers,
    in_bins,
    module_of,
    parameters,
    worker_for,
)
from rigs.nemo_rl import CHECKOUT, batch, nll_loss, policy_gradient_loss

from megapatch.errors import MisuseError
from megapatch.patch import VerdictKind
from megapatch.patches._ray_actors import class_of
from megapatch.patches.nemo_rl.split_train_step_dtensor import diagnose
from megapatch.testing import run_ranks

pytestmark = pytest.mark.thorough

STEPS, SIZE, RANKS = 2, 8, 2  # steps, and samples of a rank in each; two a microbatch
SLICES = {  # samples of each rank, by slice
    "one": ((8, 8),),
    "two": ((4, 4), (4, 4)),
    "four": ((2, 2), (2, 2), (2, 2), (2, 2)),
    "uneven": ((2, 2), (6, 6)),
    "ranks apart": ((2, 6), (6, 2)),
    "odd": ((3, 5), (1, 1), (4, 2)),
}
PASSES = {"ranks apart": 3 + 3, "odd": 3 + 1 + 2}  # of each rank; else as many as train() makes
LOSSES = {
    "nll": nll_loss,
    "policy gradient": policy_gradient_loss,
    "by sequences": lambda: policy_gradient_loss(
        token_level_loss=False,
        sequence_level_importance_ratios=True,
        truncated_importance_sampling_type="tis",
    ),
}
CASES = {  # loss, and options of the worker; the first ones clip
    "nll": ("nll", {}),
    "policy gradient": ("policy gradient", {}),
    "by sequences": ("by sequences", {}),
    "adam": ("policy gradient", {"optimizer": "adam", "max_grad_norm": 100.0}),
}
BINS = {"dynamic_batching": {}, "sequence_packing": {"train_mb_tokens": 24}}
BIN_SLICES = {"two": ((4, 4), (4, 4)), "ranks apart": ((2, 7), (6, 1))}
TOKENS = 24  # in a bin
# The imitation's losses cannot have a microbatch in which nothing counts, and ranks are given such to be alike.
CELLS = [(case, cut) for case in CASES for cut in SLICES if CHECKOUT or case == "nll" or cut == "uneven"]
# These depend on which samples share a microbatch: the first is one minus a mean in v0.6.0, the second, by
# sequences, the sum of all products of one sample's ratio and another one's mask.
BY_MICROBATCH = ("is_oob_ratio", "sampling_importance_ratio")
METHODS = ("begin_train_step", "train_microbatch", "finish_train_step", "abort_train_step")


def whole(worker, step, loss, kind=None):
    return worker.train(batch(step, SIZE, sharer(worker)), loss, gbs=SIZE * worker.dp_size)


def in_slices(cut, passes=None, between=lambda worker: None):
    def split(worker, step, loss, kind=None):
        before = worker.model.calls
        worker.begin_train_step(loss, gbs=SIZE * worker.dp_size)
        for data in pieces(worker, step, cut):
            assert worker.train_microbatch(in_bins(data, kind, TOKENS) if kind else data) is None
            between(worker)
        told = worker.finish_train_step()
        assert passes is None or worker.model.calls - before == passes
        return told

    return split


def logprobs(worker):
    """Of other samples, as a controller asks for them while a step is open."""
    worker.get_logprobs(batch(99, 4, worker.rank))


def sharer(worker):
    """The data-parallel rank."""
    return worker.dp_mesh.get_local_rank()


def pieces(worker, step, cut):
    data, at = batch(step, SIZE, sharer(worker)), 0
    for sizes in cut:
        yield data.slice(at, at + sizes[worker.rank])
        at += sizes[worker.rank]


def trained(made, loss, take_step, kind=None):
    """By step what is told, and the parameters in the end."""
    return [take_step(made, step, LOSSES[loss](), kind) for step in range(STEPS)], parameters(made)


def compared(rank, world_size):
    found = {}
    with contextlib.redirect_stdout(None):
        for name in WORKERS:
            for case, (loss, options) in CASES.items():
                expected = trained(worker_for(name, **options), loss, whole)
                for cut in (cut for of, cut in CELLS if of == case):
                    take_step = in_slices(SLICES[cut], PASSES.get(cut, 4))
                    got = trained(worker_for(name, **options), loss, take_step)
                    without = BY_MICROBATCH if cut == "odd" else ()
                    found[name, case, cut] = differences(got, expected, without)
            expected = trained(worker_for(name), "nll", whole)
            got = trained(worker_for(name), "nll", in_slices(SLICES["uneven"], between=logprobs))
            found[name, "logprobs between"] = differences(got, expected)
            expected = trained(worker_for(name, cp=2), "nll", whole)
            got = trained(worker_for(name, cp=2), "nll", in_slices(SLICES["uneven"]))
            found[name, "context parallel"] = differences(got, expected)
            for kind, settings in BINS.items():
                expected = trained(worker_for(name), "nll", whole)  # not in bins: the result is the same
                for cut, sizes in BIN_SLICES.items():
                    made = worker_for(name, settings={kind: {"enabled": True, **settings}})
                    found[name, kind, cut] = differences(trained(made, "nll", in_slices(sizes), kind), expected)
    return found


def differences(got, expected, without=()):
    """By what is told, `without` some, and "parameters": the largest relative difference."""
    (steps, ours), (expected_steps, theirs) = got, expected
    largest = max(float((ours[name] - value).abs().max() / value.abs().max()) for name, value in theirs.items())
    found = {"parameters": largest}
    for one, other in zip(steps, expected_steps, strict=True):
        assert one.keys() == other.keys()
        one, other = summary(one), summary(other)
        assert one.keys() == other.keys()
        for name, value in ((name, value) for name, value in other.items() if name not in without):
            difference = abs(one[name] - value) / max(abs(value), 1e-6)
            found[name] = max(found.get(name, 0.0), difference)
    return found


def summary(told):
    (loss,), grad_norm = told["global_loss"].tolist(), told["grad_norm"].reshape(())
    found = {"global_loss": loss, "grad_norm": float(grad_norm)}
    for name, values in told["all_mb_metrics"].items():
        if name in ("lr", "global_valid_seqs", "global_valid_toks"):
            (found[name],) = set(values)
        else:
            combine = min if "_min" in name else max if "_max" in name else math.fsum
            found[name] = combine(float(value) for value in values)
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(compared, RANKS, setup=find_workers, timeout=580)


def close(ranks, *case):
    for found in ranks:
        assert {name: value for name, value in found[case].items() if value > 1e-5} == {}


@pytest.mark.parametrize(("case", "cut"), CELLS)
@pytest.mark.parametrize("worker", WORKERS)
def test_a_step_in_slices_is_that_of_train(ranks, worker, case, cut):
    close(ranks, worker, case, cut)


@pytest.mark.parametrize("case", ["logprobs between", "context parallel"])
@pytest.mark.parametrize("worker", WORKERS)
def test_so_is_one_with(ranks, worker, case):
    close(ranks, worker, case)


@pytest.mark.parametrize("cut", BIN_SLICES)
@pytest.mark.parametrize("kind", BINS)
@pytest.mark.parametrize("worker", WORKERS)
def test_and_one_of_samples_in_bins(ranks, worker, kind, cut):
    close(ranks, worker, kind, cut)


# ---------------------------------------------------------------- exceptions, and calls in a wrong order
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
    for data in pieces(worker, 7, cut):
        worker.train_microbatch(data)


def fault_in_layer(worker, cut):
    worker.begin_train_step(nll_loss(), gbs=SIZE * RANKS)
    first, *rest = pieces(worker, 7, cut)
    worker.train_microbatch(first)
    layer = worker.model.model.layers[1]
    layer.raises = True
    try:
        worker.train_microbatch(rest[0])
    finally:
        layer.raises = False


def fault_in_data(worker, cut):
    worker.begin_train_step(nll_loss(), gbs=SIZE * RANKS)
    first, second = pieces(worker, 7, cut)
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
    worker.train_microbatch(next(pieces(worker, 7, cut)))
    worker.abort_train_step()
    raise Interrupted


FAULTS = (fault_in_loss, fault_in_layer, fault_in_data, fault_in_optimizer, fault_between)


def after_faults(rank, world_size):
    found, cut = {}, SLICES["two"]
    with contextlib.redirect_stdout(None):
        for name in WORKERS:
            expected = trained(worker_for(name), "nll", whole)
            for fault in FAULTS:
                for how, take_step in {"in slices": in_slices(cut), "train()": whole}.items():
                    made = worker_for(name)
                    attributes = dict(vars(made))
                    with pytest.raises((Interrupted, AssertionError)):
                        fault(made, cut)
                    made.abort_train_step()  # does nothing any more
                    changed = {key for key, value in vars(made).items() if attributes.get(key) is not value}
                    assert changed <= {"_train_step_state"} and made._train_step_state is None
                    assert all(one.grad is None for one in made.model.parameters())
                    found[name, fault.__name__, how] = differences(trained(made, "nll", take_step), expected)
            found[name, "misuse"] = misuses(made, name)
            found[name, "nothing counts"] = nothing_counts(name)
    return found


def misuses(worker, name):
    """What is said, by the method that is called."""
    found = {}

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
    attempt("tensor parallel", worker_for(name, tp=2).begin_train_step, nll_loss(), gbs=16)
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
    return run_ranks(after_faults, RANKS, setup=find_workers, timeout=580)


@pytest.mark.parametrize("how", ["in slices", "train()"])
@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS])
@pytest.mark.parametrize("worker", WORKERS)
def test_after_an_exception_the_next_step_is_a_fresh_one(faulty_ranks, worker, fault, how):
    close(faulty_ranks, worker, fault, how)


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
        "tensor parallel": "with FSDP2 all ranks have to be data parallel",
    }
    for found in faulty_ranks:
        said = found[worker, "misuse"]
        assert said.keys() == expected.keys()
        assert [what for what, text in expected.items() if text not in said[what]] == []


@pytest.mark.parametrize("worker", WORKERS)
def test_a_step_in_which_nothing_counts_leaves_parameters(faulty_ranks, worker):
    for found in faulty_ranks:
        assert found[worker, "nothing counts"] == (True, 0.5, 0.0, {})


# ---------------------------------------------------------------- the class, Ray's of it, and others
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


class Strange:
    """Not like the worker."""

    def train(self, data):
        return data


def verdicts():
    """Of each worker's module as it is, and of modules that are not like it."""
    found = {}
    for name in WORKERS:
        module, worker = module_of(name), CLASSES[name]
        actor = worker.removesuffix("Impl")
        named = functools.partial(SimpleNamespace, __name__=module.__name__)
        own = type(worker, (Strange,), {"begin_train_step": Strange.train})
        others = {
            "it": module,
            "with its own": named(**{worker: own}),
            "strange": named(**{worker: Strange}),
            "the actor alone": named(**{actor: Strange}),
            "nothing": named(),
        }
        found[name] = {what: diagnose(one) for what, one in others.items()}
    return found


def describe(rank, world_size):
    return {"methods": methods(rank, world_size), "verdicts": verdicts()}


@pytest.fixture(scope="module")
def described():
    (found,) = run_ranks(describe, 1, setup=find_workers)
    return found


def test_without_the_patch_there_is_train_alone():
    (found,) = run_ranks(methods, 1, setup=find_workers, env={"MEGAPATCH_DISABLE": "*"})
    assert found == {name: [[], []] for name in WORKERS}


def test_the_actor_class_has_them_too(described):
    assert described["methods"] == {name: [list(METHODS), list(METHODS)] for name in WORKERS}


def test_says_what_it_found(described):
    found = described["verdicts"]
    expected = {
        "it": VerdictKind.NEEDED,
        "with its own": VerdictKind.FIXED,
        "strange": VerdictKind.UNKNOWN,
        "the actor alone": VerdictKind.UNSUPPORTED,
        "nothing": VerdictKind.ABSENT,
    }
    for name in WORKERS:
        assert {what: verdict.kind for what, verdict in found[name].items()} == expected
        assert "zero_grad in Strange.train" in found[name]["strange"].reason
