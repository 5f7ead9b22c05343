"""megatron.fully-reshardable-states: what is saved of each parameter, at 2 ranks, in several buckets."""

import importlib

import pytest
from rigs.cells import cells_of
from rigs.diagnosed_code import made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.options import BOTH, attempt
from rigs.megatron.save import minor

from megapatch.patches._diagnosis import StandIn
from megapatch.patches.megatron.fully_reshardable_states import (
    MODULE,
    STATES,
    WHERE,
    _bucket,
    diagnose,
    slice_without_padding,
)
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._model import _gpt_of
from megapatch.weight_sync import gathered_parameters

pytestmark = pytest.mark.skipif(minor() < 15, reason="the format came with 0.15")

LAYOUTS = {"buckets": BOTH, "one bucket": {**BOTH, "overlap_grad_reduce": False, "overlap_param_gather": False}}
OTHERS = {"MEGAPATCH_DISABLE": "megatron.fully-reshardable-states"}


def saved_and_trained(options):
    """Return by parameter the fraction of its saved main parameter that is not what the model has."""
    model = tiny_gpt(**options)
    for step in range(2):
        model.train_step(step)
    gathered_parameters(model.chunks)
    states = model.optimizer.chained_optimizers[0] if hasattr(model.optimizer, "chained_optimizers") else None
    optimizer = states or model.optimizer
    sharded = _gpt_of(model.chunks[0]).sharded_state_dict(metadata={})
    found = getattr(optimizer, STATES)(sharded, metadata={})
    parameters = [parameter for buffer in optimizer.buffers for parameter in buffer.param_index_map]
    return [
        (found[index]["param"].data.cuda() != parameter).float().mean().item()
        for index, parameter in enumerate(parameters)
    ]


# ------------------------------------------------------------------------------------------ the diagnosis
def counts_padding(self, model, is_loading=False, metadata=None):
    """As a repair might: what comes before a parameter is counted in buckets, without their padding."""
    (buffer,) = self.buffers
    assert sum(bucket.numel_unpadded for bucket in buffer.buckets) == buffer.numel_unpadded
    found = {}
    for index, (start, end, bucket) in enumerate(buffer.param_index_map.values()):
        before = buffer.buckets[:bucket]
        padding = sum(one.grad_data.numel() - one.numel_unpadded for one in before)
        state = self.get_parameter_state_dp_zero()[0]["dtype"]["param"]
        found[index] = {"param": state[start - padding : end - padding]}
    return found


def diagnoses():
    module = importlib.import_module(MODULE)
    kind = module.DistributedOptimizer
    return verdicts_of(diagnose, module, made_up(kind, STATES, counts_padding))


DIAGNOSES = {
    "counts_padding": ("fixed", "without padding"),
}


def job(rank, world_size):
    init_parallel()
    for name, options in LAYOUTS.items():
        yield name, lambda options=options: attempt(saved_and_trained, options)
    yield "diagnoses", diagnoses


unpatched = cells_of(job, 2, env=OTHERS)
patched = cells_of(job, 2)


@pytest.mark.quick
def test_without_the_patch_parameters_are_saved_with_others_states(unpatched):
    for found in unpatched:
        error, wrong = found["buckets"]
        assert error is None and max(wrong) > 0.9


@pytest.mark.quick
def test_each_parameter_is_saved_with_its_own_state(patched):
    for found in patched:
        for name in LAYOUTS:
            error, wrong = found[name]
            assert error is None and not any(wrong), wrong


def test_every_buffer_is_taken_without_padding():
    """Buffers of several dtypes, as in models with parameters in fp32: a tiny GPT has one."""

    def buffer():
        where = {"first": (0, 1, 0), "second": (128, 130, 1)}
        return StandIn(**{WHERE: where}, buckets=[_bucket(size=128, unpadded=1), _bucket(size=128, unpadded=2)])

    states = slice_without_padding(lambda self: [getattr(buffer, WHERE) for buffer in self.buffers])
    assert states(StandIn(buffers=[buffer(), buffer()])) == [{"first": (0, 1, 0), "second": (1, 3, 1)}] * 2


def test_diagnosis(patched):
    assert_verdicts(patched[0]["diagnoses"], DIAGNOSES)
