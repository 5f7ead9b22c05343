"""megatron.load-offloaded-state: training that continues from a checkpoint of the real dist_checkpointing."""

from __future__ import annotations

import copy
import functools
import importlib
import tempfile

import pytest
from rigs.cells import cells_of
from rigs.diagnosed_code import GONE, made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.offloading import OFFLOADS, offloading, offloading_gpt
from rigs.megatron.options import UNPATCHED, attempt, quick_writer
from rigs.megatron.save import minor

from megapatch.patch import MARK
from megapatch.testing import init_parallel

AWARE = {"use_precision_aware_optimizer": True}
CASES = {"half": OFFLOADS["half"], "precision-aware": {**OFFLOADS["half"], **AWARE}}
STEPS = range(3, 5)


def tree(model, loading):
    sharded = gpt(model).sharded_state_dict()
    kind = (
        "fully_sharded_model_space" if minor() < 16 else "dp_reshardable"
    )  # no buckets there: with a step they are not saved
    how = {"metadata": {"distrib_optim_sharding_type": kind}} if minor() > 12 else {"sharding_type": kind}
    optimizer = model.optimizer.sharded_state_dict(sharded, is_loading=loading, **how)
    return {"model": sharded, "optimizer": optimizer}


def gpt(model):
    return model.chunks[0].module.module


def through_checkpoint(saved, template):
    from megatron.core import dist_checkpointing

    if minor() < 16:  # whose checkpoints torch does not read, for they have classes in them, or not write
        return in_memory(saved, template())
    with tempfile.TemporaryDirectory() as folder:
        dist_checkpointing.save(saved, folder)
        return dist_checkpointing.load(template(), folder)


def in_memory(saved, template):
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    if isinstance(template, LocalNonpersistentObject):
        return template.unwrap()
    if isinstance(template, dict):
        return {key: in_memory(value, template.get(key)) for key, value in saved.items()}
    if isinstance(template, list):
        return [in_memory(one, other) for one, other in zip(saved, template, strict=True)]
    return copy.deepcopy(getattr(saved, "data", saved))


def resumed(options):
    """Return how far a resumed run is from the one that continued, by step."""
    with offloading(options):
        build = functools.partial(offloading_gpt, options, lr=0.01, use_distributed_optimizer=True)
        build = functools.partial(build, optim={"adam_eps": 1e-8, **options})
        model = build()
        for step in range(3):
            model.train_step(step)
        saved = copy.deepcopy(tree(model, loading=False))
        expected = [model.train_step(step) and model.parameters() for step in STEPS]

        model = build()
        for parameter, held in inner_parameters(model.optimizer):
            parameter.data.add_(1)  # a new process starts from other weights
            held.data.copy_(parameter.data)
        loaded = through_checkpoint(saved, lambda: tree(model, loading=True))
        gpt(model).load_state_dict(loaded["model"], strict=False)  # strictly, it asks for Transformer Engine's
        model.optimizer.load_state_dict(loaded["optimizer"])
        found = [model.train_step(step) and model.parameters() for step in STEPS]
    return [
        max((one[name] - other[name]).abs().max().item() for name in one)
        for one, other in zip(expected, found, strict=True)
    ]


def inner_parameters(optimizer):
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from each.optimizer.param_to_inner_param.items()


def job(rank, world_size):
    init_parallel()
    quick_writer()
    for name, options in CASES.items():
        yield name, functools.partial(attempt, resumed, options)
    yield "diagnoses", diagnoses


# ------------------------------------------------------------------------------------------ the diagnosis
def as_on_main(self):
    """Parameters in fp32 are left out."""
    for parameter, state in self.state.items():
        held = self.param_to_fp32_param.get(parameter)
        if held is not None and self.param_update_in_fp32:
            held.data.copy_(state["master_param"])


def of_all(self):
    for parameter, held in self.param_to_inner_param.items():
        if parameter not in self.param_to_fp32_param or self.param_update_in_fp32:
            held.data.copy_(self.state[parameter]["master_param"])


def needs_more(self):
    return self.param_to_fp32_param, self.param_update_in_fp32, "master_param", self.something_new()


def is_another(self): ...


def syncs_at_last(self, state):
    self.optimizer._sync_hdo_state_to_sub_optimizers()


def diagnoses():
    from megapatch.patches.megatron.load_offloaded_state import LOAD_BUCKETS, diagnose

    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    hybrid, optimizer = module.HybridDeviceOptimizer, module.DistributedOptimizer
    targets = (hybrid._sync_hdo_state_to_sub_optimizers, optimizer._set_main_param_and_optimizer_states)
    update = "_update_fp32_params_by_new_state"
    load = next(name for name in LOAD_BUCKETS if hasattr(optimizer, name))
    changes = {
        **made_up(hybrid, update, as_on_main, of_all, needs_more, is_another),
        "repaired": [(hybrid, update, of_all), (optimizer, load, syncs_at_last)],
        "no offloading": (module, "HybridDeviceOptimizer", GONE),
    }
    return {"marked": [hasattr(target, MARK) for target in targets], **verdicts_of(diagnose, module, changes)}


DIAGNOSES = {
    "as it is": ("needed", "raises KeyError for parameters that are in fp32"),
    "as_on_main": ("needed", "keep the weights from before"),
    "of_all": ("needed", "the step count of before"),
    "needs_more": ("unknown", "TypeError"),
    "is_another": ("unknown", "not found: param_to_fp32_param in"),
    "repaired": ("fixed", "reaches the copies"),
    "no offloading": ("unknown", "HybridDeviceOptimizer"),
}


# ------------------------------------------------------------------------------------------ the checks
unpatched = cells_of(job, 1, env=UNPATCHED)
patched = cells_of(job, 1)


def test_without_the_patch_loading_fails_or_training_continues_from_another_step(unpatched):
    error, text = unpatched["half"]
    assert (error, text[:7]) == ("KeyError", "tensor(")
    error, differences = unpatched["precision-aware"]
    assert error is None
    if minor() < 16:  # its format takes over no step, and updates the copies
        assert differences == [0.0] * len(STEPS)
    else:
        assert min(differences) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_one_that_continued(patched, name):
    assert patched[name] == (None, [0.0] * len(STEPS))


def test_diagnosis(unpatched, patched):
    before, found = unpatched["diagnoses"], patched["diagnoses"]
    assert (before.pop("marked"), found.pop("marked")) == ([False, False], [True, True])
    assert before == found  # a second look, through the patch, gives the same answers
    assert_verdicts(found, DIAGNOSES)
