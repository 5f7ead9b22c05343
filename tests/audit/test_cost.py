"""The price of the audit: memory that does not grow with steps, and no wait for a tensor between comparisons."""

from __future__ import annotations

import functools
import gc
import sys

import pytest
import torch
from rigs.audit import running_audit
from rigs.cells import AUDITED
from rigs.megatron.options import BOTH, GRADS, UNPATCHED

from megapatch import audit
from megapatch._verify.operations import Operations
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

pytestmark = pytest.mark.thorough

STEPS = 3_000
EVERY = 50
WARM_UP = 20 * EVERY
MOST = STEPS // 3
"""Blocks of Python's memory that may come and go (505 of them have been seen): one more a step would be 3,000."""


# ------------------------------------------------------------------------ memory
class Tiny:
    """One linear layer in the real DistributedDataParallel, with the real optimizer and schedule."""

    def __init__(self):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.enums import ModelType
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import MegatronModule

        class Linear(MegatronModule):
            model_type = ModelType.encoder_or_decoder

            def __init__(self, config):
                super().__init__(config)
                self.layer = torch.nn.Linear(4, 1)

            def set_input_tensor(self, tensors):
                pass

            def forward(self, data):
                return self.layer(data)

        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        config.calculate_per_token_loss = True
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(), Linear(config))
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="sgd", lr=1e-3, min_lr=0.0, clip_grad=0.0), [self.model]
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self.data = torch.ones(1, 4)

    def _forward(self, iterator, model):
        def loss(output):
            return output.sum(), torch.tensor(1, dtype=torch.int), {}

        return model(next(iterator)), loss

    def step(self, zero=True):
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

        if zero:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
        forward_backward_no_pipelining(
            forward_step_func=self._forward,
            data_iterator=iter([self.data]),
            model=[self.model],
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
        )
        self.optimizer.step()


def grown(tiny, steps, **options):
    """Return by how many blocks of Python's memory, and tensors, the process grows in some steps."""
    for _ in range(WARM_UP):
        tiny.step(**options)
    counts = _counts()
    for _ in range(steps):
        tiny.step(**options)
    return [after - before for before, after in zip(counts, _counts(), strict=True)]


def _counts():
    audit.findings()  # reads the results that wait for the next close look
    gc.collect()
    return sys.getallocatedblocks(), sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def soak(rank, world_size):
    torch.set_num_threads(1)
    init_parallel()
    tiny = Tiny()
    healthy = grown(tiny, STEPS)
    none = audit.findings()
    return healthy, none, grown(tiny, STEPS, zero=False), [each.count for each in audit.findings()]


@pytest.mark.nightly
def test_nothing_grows_with_the_steps():
    env = {**UNPATCHED, **AUDITED, "MEGAPATCH_AUDIT_EVERY": str(EVERY)}
    ranks = run_ranks(soak, 2, env=env, timeout=400.0)  # 40 s on an idle machine
    for (blocks, tensors), none, (broken_blocks, broken_tensors), counts in ranks:
        assert none == []
        assert blocks < MOST and tensors <= 0
        assert broken_blocks < MOST and broken_tensors <= 0
        assert max(counts) >= STEPS  # a finding is one, however often it is made


# ------------------------------------------------------------------------ waiting
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
