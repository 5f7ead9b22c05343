"""megatron.dropped-models-freed: models that were dropped, and what has to stay the same."""

from __future__ import annotations

import gc
import importlib
import weakref
from functools import partial

import pytest
from rigs.cells import cells_of
from rigs.diagnosed_code import GONE, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.process_groups import SHARDED, cycles, experts, initialize

from megapatch.patches.megatron.dropped_models_freed import DDP, MAKE, MODULE, diagnose, refer_weakly
from megapatch.testing import destroy_parallel, tiny_gpt

CYCLES = 3
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
MODELS = {name: (experts(name), {"expert_model_parallel_size": 2}) for name in ("alltoall", "allgather")}
MODELS["dense, fp32"] = (SHARDED, {})
MODELS["dense, fp32, overlapped reduce"] = ({**SHARDED, "overlap_grad_reduce": True}, {})
LATE = {"fp32": {**SHARDED, **OVERLAPS}, "bf16": {**SHARDED, **OVERLAPS, "dtype": "bf16"}}


def alive_in_the_next_layout(options):
    """Return whether a model lives, once it was dropped, and once another layout is set up."""
    initialize()
    importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(1)
    model = tiny_gpt(**options)
    model.train_step(0)
    (chunk,) = map(weakref.ref, model.chunks)
    del model
    gc.collect()
    found = [chunk() is not None]
    destroy_parallel()
    initialize()
    gc.collect()
    destroy_parallel()
    return [*found, chunk() is not None]


def job(rank, world_size):
    for name, (options, sizes) in MODELS.items():
        yield name, partial(cycles, CYCLES, options, **sizes)
    for name, options in LATE.items():
        yield name, partial(alive_in_the_next_layout, options)


patched = cells_of(job, 2)
without = cells_of(job, 2, env={"MEGAPATCH_DISABLE": "megatron.dropped-models-freed"})  # groups are destroyed


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick
def test_models_that_were_dropped_are_freed_and_train_as_before(without, patched, name):
    for before, now in zip(without, patched, strict=True):
        for one, other in zip(before[name], now[name], strict=True):
            assert (other.steps, other.weights) == (one.steps, one.weights)
            assert one.alive > other.alive == 0
        groups = [one.groups for one in before[name]]
        assert groups == sorted({*groups})  # those of each layout stay
        assert len({one.groups for one in now[name]}) == 1


@pytest.mark.parametrize("name", LATE)
def test_with_overlap_param_gather_they_are_freed_as_the_next_layout_is_set_up(without, patched, name):
    """The cache of rotary tables keeps a module of theirs, whose hook refers to them."""
    for rank in patched:
        assert rank[name] == [True, False]
    if name == "fp32":
        for rank in without:
            assert rank[name] == [True, True]


def test_a_hook_does_what_the_originals_does_as_long_as_its_owner_is_there():
    calls = []

    class Owner:
        result = "a result"

    def make(self, param):
        def hook(*unused):
            calls.append((param, unused))
            return self.result

        return hook

    def of(hook, *arguments):  # a function without a closure, in that of a hook
        return hook(*arguments)

    def make_around(self, param):
        hook = make(self, param)
        return lambda *unused: (self.result, of(hook, *unused))

    for maker, result in ((make, Owner.result), (make_around, (Owner.result, Owner.result))):
        owner = Owner()
        hook, gone = refer_weakly(maker)(owner, "a parameter"), weakref.ref(owner)
        assert hook("an argument") == result
        assert calls == [("a parameter", ("an argument",))]
        calls.clear()
        del owner
        assert gone() is None
        assert hook("an argument") is None and not calls


def verdicts(rank, world_size):
    kind = getattr(importlib.import_module(MODULE), DDP)

    def weak(self, param):
        owner = weakref.ref(self)
        return lambda *unused: owner().param_to_bucket_group[param] or param.main_grad

    def partial_of_it(self, param):
        return partial(lambda owner: owner.param_to_bucket_group[param] or param.main_grad, self)

    edits = {"weak": (kind, MAKE, weak), "partial": (kind, MAKE, partial_of_it), "gone": (kind, MAKE, GONE)}
    return verdicts_of(diagnose, importlib.import_module(MODULE), edits)


def test_verdicts():
    expected = {
        "weak": ("fixed", "do not keep their model"),
        "partial": ("unknown", "in its closure"),
        "gone": ("unknown", MAKE),
    }
    assert_verdicts(of_a_rank(verdicts), expected)
