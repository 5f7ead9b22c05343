"""nemo_rl.split-train-step-dtensor: the four methods on NeMo-RL's own DTensor workers, at 2 ranks on CPU.

A step in slices against the same worker's train() on all of them at once: what it tells, by name, and parameters.
Without a checkout it is our imitation of the first worker.
"""

import contextlib
import functools
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
from rigs.cells import once, run_cells
from rigs.nemo_rl.dtensor import (
    CLASSES,
    SLICES,
    WORKERS,
    assert_close,
    differences,
    find_workers,
    in_bins,
    module_of,
    trained,
    worker_for,
)
from rigs.nemo_rl.steps import in_slices, whole
from rigs.nemo_rl.worker import CHECKOUT, batch

from megapatch.patch import VerdictKind
from megapatch.patches._ray_actors import class_of
from megapatch.patches.nemo_rl.split_train_step_dtensor import diagnose
from megapatch.testing import run_ranks

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
# These depend on which samples share a microbatch: the first is one minus a mean in v0.6.0, the second, by
# sequences, the sum of all products of one sample's ratio and another one's mask.
BY_MICROBATCH = ("is_oob_ratio", "sampling_importance_ratio")


def logprobs(worker):
    """Of other samples, as a controller asks for them while a step is open."""
    worker.get_logprobs(batch(99, 4, worker.rank))


def counted(take_step, passes):
    """Take a step, and see that the model makes that many passes in it."""

    def step(worker, *args):
        before = worker.model.calls
        told = take_step(worker, *args)
        assert worker.model.calls - before == passes
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


def run(name, loss, take_step, **options):
    return trained(worker_for(name, **options), loss, take_step)


def cell(expected, name, loss, take_step, without=(), **options):
    reference = expected()
    return differences(run(name, loss, take_step, **options), reference, without)


@pytest.fixture(scope="module")
def ranks():
    return run_cells(compared, RANKS, setup=find_workers, timeout=580)


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
        own = type(worker, (Strange,), dict.fromkeys(METHODS, Strange.train))
        others = {
            "it": module,
            "with its own": named(**{worker: own}),
            "strange": named(**{worker: Strange}),
            "the actor alone": named(**{actor: Strange}),
            "nothing": named(),
        }
        found[name] = {what: diagnose(one) for what, one in others.items()}
        with mock.patch.object(module, "BatchedDataDict", Strange):
            found[name]["strange data"] = diagnose(module)
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
        "nothing": VerdictKind.UNKNOWN,
        "strange data": VerdictKind.UNKNOWN,
    }
    for name in WORKERS:
        assert {what: verdict.kind for what, verdict in found[name].items()} == expected
        assert "zero_grad in Strange.train" in found[name]["strange"].reason
