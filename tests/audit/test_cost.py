"""The price of the audit: no wait for a tensor between comparisons."""

from __future__ import annotations

import functools

import pytest
from rigs.audit import running_audit
from rigs.cells import AUDITED
from rigs.megatron.options import BOTH, GRADS, UNPATCHED

from megapatch import audit
from megapatch._verify.operations import Operations
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

pytestmark = pytest.mark.thorough

FP16 = {"dtype": "fp16", "loss_scale": 2.0**10}
BETWEEN = 16
MODELS = {"overlap": BOTH, "fp16": {**FP16, **GRADS}, "tokens": {"per_token_loss": True}}


def host_reads(model, step):
    with Operations() as operations:
        model.train_step(step)
    return len(operations.waits)


def reads(rank, world_size):
    """By model, the host reads of each step; the last comparison of ranks is in the step before the last."""
    init_parallel()
    found = {}
    for name, options in MODELS.items():
        model = tiny_gpt(**options)
        audit.clear()
        if running_audit() is not None:
            running_audit().ledger.step = 0
        found[name] = [host_reads(model, step) for step in range(BETWEEN + 2)]
    return found


@functools.cache
def reads_with(audited):
    env = {**AUDITED, "MEGAPATCH_AUDIT_EVERY": str(BETWEEN)} if audited else {}
    return run_ranks(reads, 2, env={**UNPATCHED, **env})[0]


@pytest.mark.parametrize("model", MODELS)
def test_it_waits_for_no_tensor_between_comparisons(model):
    audited, plain = (reads_with(audited)[model] for audited in (True, False))
    added = [more - less for more, less in zip(audited, plain, strict=True)]
    compared = (0, 1, 2, 4, 8, BETWEEN)
    with_comparison = {step + near for step in compared for near in (-1, 0, 1)}  # it is read in the step after
    assert {step for step, count in enumerate(added) if count} <= with_comparison
    assert any(added)
