"""Stand-ins for chunks of DistributedDataParallel, for parts of the audit that are shown events by hand."""

from __future__ import annotations

import torch

from megapatch.audit._chunks import state_of
from rigs.audit import Thing


class Group(Thing):
    """A bucket group, which may be in a set."""

    __hash__ = object.__hash__


class Chunk(torch.nn.Module):
    """One bucket of one parameter, and perhaps a router that has counted tokens."""

    def __init__(self, factor=1.0, size=2, by_tokens=True, averages=False, counts=None):
        super().__init__()
        self.module = torch.nn.Linear(1, 1, bias=False)
        if counts is not None:
            self.module.register_buffer("local_tokens_per_expert", torch.tensor([0, counts]))
        parameter, ranks = self.module.weight, Thing(size=lambda: size)
        parameter.main_grad = torch.zeros(1)
        bucket = Thing(params=[parameter])
        self.group = Group(
            buckets=[bucket],
            params={parameter},
            param_to_bucket={parameter: bucket},
            data_parallel_group=ranks,
            grad_reduce_handle=None,
        )
        self.buffer = Thing(
            buckets=[bucket],
            data_parallel_group=ranks,
            gradient_scaling_factor=factor,
            grad_data=parameter.main_grad,
        )
        self.buffers, self.bucket_groups, self.expert_parallel_bucket_groups = [self.buffer], [self.group], []
        self.param_to_bucket_group = {parameter: self.group}
        self.state = state_of(bucket)
        self.config = Thing(calculate_per_token_loss=by_tokens, fp16=False)
        self.ddp_config = Thing(average_in_collective=averages, use_distributed_optimizer=False)


def reported(watching):
    """Return what was found, each once, by an audit that has not failed itself."""
    assert not watching.ledger.broken
    found = [*watching.ledger.findings(), *watching.ledger.notes()]
    assert all(each.count == 1 for each in found)
    return sorted((each.rule, each.kind) for each in found)
