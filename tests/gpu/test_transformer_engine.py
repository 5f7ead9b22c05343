"""TrainStep and the audit with Transformer Engine's layers, two ranks over NCCL."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from rigs.cells import cells_of
from rigs.gpu.places import gpus
from rigs.gpu.transformer_engine import KINDS, job

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not gpus(), reason="no GPU is visible"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="it is not installed"),
]


ranks = cells_of(job, 2, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_two_calls_is_that_of_one(ranks, kind):
    for found in ranks:
        whole, split, in_fp8 = found[kind, "split"]
        assert (in_fp8 > 0) == (kind in ("delayed", "tensorwise"))
        for name, expected in whole.items():
            torch.testing.assert_close(split[name], expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_audit_is_quiet_and_its_hash_sees_a_changed_bit(ranks, kind):
    (quiet, before, after), (_, others, _) = [found[kind, "audited"] for found in ranks]
    assert quiet == []
    assert before == others != after
