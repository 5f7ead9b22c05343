"""Verdicts of megatron.gathered-when-read on real code, changed code, and exporters."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
from rigs.diagnosed_code import made_up, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts

from megapatch.patches.megatron import gathered_when_read as patch
from megapatch.patches.megatron._readers import diagnose_merge


def verdicts(rank, world_size):
    ddp = importlib.import_module("megatron.core.distributed")
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    chunk, group = ddp.DistributedDataParallel, ddp.param_and_grad_buffer._ParamAndGradBucketGroup

    def gathers(self, *args, **kwargs):
        self.disable_forward_pre_hook()
        return self.module.state_dict(*args, **kwargs)

    def needs_more(self, *args, **kwargs):
        return self.something_new

    def another_step(self): ...

    changes = {
        "repaired in part": (chunk, "state_dict", gathers),
        "repaired": [(chunk, "state_dict", gathers), (chunk, "state_dict_for_save_checkpoint", gathers)],
        "needs more": (chunk, "state_dict", needs_more),
        "other gathers": (group, "finish_param_sync", another_step),
    }
    of_optimizer = made_up(optimizer.DistributedOptimizer, "step_with_ready_grads", another_step)
    return (
        verdicts_of(patch.diagnose_ddp, ddp, changes),
        verdicts_of(patch.diagnose_optimizer, optimizer, of_optimizer),
    )


def test_megatron():
    found, found_of_optimizer = of_a_rank(verdicts)
    expected = {
        "as it is": ("needed", "read parameters that are not gathered"),
        "repaired in part": ("needed", ""),
        "repaired": ("fixed", "gather the parameters"),
        "needs more": ("unknown", "module.state_dict called by state_dict"),
        "other gathers": ("unknown", "parameter skip_next_bucket_dispatch of"),
    }
    assert_verdicts(found, expected)
    expected = {
        "as it is": ("needed", "a step leaves its parameters to be gathered"),
        "another_step": ("unknown", "overlap_param_gather in"),
    }
    assert_verdicts(found_of_optimizer, expected)


@pytest.fixture
def made(monkeypatch):
    """Returns a function that makes an importable module of names."""

    def make(name, **names):
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def export(models):
    for model in models:
        yield from model.parameters()


def gathered_export(models):
    for model in models:
        model.start_param_sync(force_sync=True)
    yield from export(models)


def export_of(chunks):
    yield from chunks


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (export, "needed", "with overlap_param_gather export() reads parameters that are not gathered"),
        (gathered_export, "fixed", "export() gathers"),
        (export_of, "unknown", "parameter models of test_exporter:export"),
        (None, "unknown", "test_exporter:export"),
    ],
)
def test_exporters(made, found, kind, words):
    verdict = patch.diagnose_reader("export", "models", made("test_exporter", export=found))
    assert verdict.kind.value == kind
    assert words in verdict.reason


class Layer:
    def merge(self):
        self.weight += self.get_delta_weights()


class Merged:
    def merge(self):
        self.weight += self.delta


@pytest.mark.parametrize(
    ("layer", "kind", "words"),
    [
        (Layer, "needed", "merge() reads parameters that are not gathered"),
        (Merged, "unknown", "get_delta_weights in test_bridge:LoraParallelLinear.merge"),
    ],
)
def test_merging_adapters(made, layer, kind, words):
    verdict = diagnose_merge(made("test_bridge", LoraParallelLinear=layer))
    assert verdict.kind.value == kind
    assert words in verdict.reason
