"""Verdicts of megatron.gathered-when-read on real code, changed code, and exporters."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from unittest import mock

import pytest
from rigs.megatron.options import UNPATCHED

from megapatch.patches.megatron import gathered_when_read as patch
from megapatch.testing import run_ranks


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

    found = {"as it is": patch.diagnose_ddp(ddp), "optimizer": patch.diagnose_optimizer(optimizer)}
    with mock.patch.object(chunk, "state_dict", gathers):
        found["repaired in part"] = patch.diagnose_ddp(ddp)
        with mock.patch.object(chunk, "state_dict_for_save_checkpoint", gathers):
            found["repaired"] = patch.diagnose_ddp(ddp)
    with mock.patch.object(chunk, "state_dict", needs_more):
        found["needs more"] = patch.diagnose_ddp(ddp)
    with mock.patch.object(group, "finish_param_sync", another_step):
        found["other gathers"] = patch.diagnose_ddp(ddp)
    with mock.patch.object(optimizer.DistributedOptimizer, "step_with_ready_grads", another_step):
        found["another step"] = patch.diagnose_optimizer(optimizer)
    return {case: (verdict.kind.value, verdict.reason) for case, verdict in found.items()}


def test_megatron():
    unpatched, patched = run_ranks(verdicts, 1, env=UNPATCHED), run_ranks(verdicts, 1)
    assert patched == unpatched
    (found,) = patched
    expected = {
        "as it is": ("needed", "read parameters that are not gathered"),
        "optimizer": ("needed", "a step leaves its parameters to be gathered"),
        "repaired in part": ("needed", ""),
        "repaired": ("fixed", "gather the parameters"),
        "needs more": ("unknown", "module.state_dict called by state_dict"),
        "other gathers": ("unknown", "parameter skip_next_bucket_dispatch of"),
        "another step": ("unknown", "overlap_param_gather in"),
    }
    assert found.keys() == expected.keys()
    for case, (kind, words) in expected.items():
        assert found[case][0] == kind, case
        assert words in found[case][1], case


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
def test_exporters(monkeypatch, found, kind, words):
    module = ModuleType("test_exporter")
    module.export = found
    monkeypatch.setitem(sys.modules, "test_exporter", module)
    verdict = patch.diagnose_reader("export", "models", module)
    assert verdict.kind.value == kind
    assert words in verdict.reason
