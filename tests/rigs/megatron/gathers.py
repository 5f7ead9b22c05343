"""Models whose parameters wait to be gathered, what is read from them, and the gathers that runs make."""

import contextlib
import sys
from unittest import mock

import torch

from megapatch.testing import tiny_gpt
from megapatch.testing._model import global_name
from rigs.megatron.options import ADAM

PLAIN = {**ADAM, "lr": 0.1, "overlap_grad_reduce": True, "use_distributed_optimizer": True}
OVERLAP = {**PLAIN, "overlap_param_gather": True}
FLAGS = "param_gather_handle", "param_gather_dispatched"


def pair(**more):
    """Return a model without overlap_param_gather and one with it; all else, the weights included, is the same."""
    return tiny_gpt(**{**PLAIN, **more}), tiny_gpt(**{**OVERLAP, **more})


def unwrapped(chunk):
    while not hasattr(chunk, "decoder"):  # DDP, Float16Module
        chunk = chunk.module
    return chunk


def parameters_of(chunks):
    """Return copies of the parameters by their names in the whole model."""
    return {
        global_name(unwrapped(chunk), name): parameter.detach().clone()
        for chunk in chunks
        for name, parameter in unwrapped(chunk).named_parameters()
    }


def state_of(model):
    """Which gathers this rank takes to be under way and done."""
    return [
        tuple(bool(getattr(group, flag)) for flag in FLAGS)
        for chunk in model.chunks
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ]


def wrong(found, expected):
    """Return the fraction of the elements that differ in any bit."""
    assert found.keys() == expected.keys()
    differing = sum(int((found[name] != expected[name]).sum()) for name in expected)
    return differing / sum(tensor.numel() for tensor in expected.values())


def between_ranks(parameters):
    """Return the fraction of the elements that differ between rank 0 and some other rank. A collective."""
    mine = torch.cat([parameters[name].flatten() for name in sorted(parameters)]).cuda()
    first = mine.clone()
    torch.distributed.broadcast(first, 0)
    differing = (mine != first).float()
    torch.distributed.all_reduce(differing, torch.distributed.ReduceOp.MAX)
    return float(differing.mean())


class Collectives:
    """Counts the parameter gathers that begin, one a bucket, and looks for any collective at all."""

    def __init__(self):
        self.gathers = 0

    @contextlib.contextmanager
    def counted(self):
        module = sys.modules["megatron.core.distributed.param_and_grad_buffer"]
        original = module.dist_all_gather_func

        def gather(*args, **kwargs):
            self.gathers += 1
            return original(*args, **kwargs)

        with mock.patch.object(module, "dist_all_gather_func", gather):
            yield self

    def during(self, function, *args, **kwargs):
        """Return how many begin in a call."""
        before = self.gathers
        with self.counted():
            function(*args, **kwargs)
        return self.gathers - before


@contextlib.contextmanager
def gathers_of_one_rank_as_with_nccl():
    """Let a gather in which a rank is alone write nothing, as with NCCL.

    gloo copies the rank's shard out and, some time later, back: what an optimizer writes in between is lost.
    """
    module = sys.modules["megatron.core.distributed.param_and_grad_buffer"]
    original = module.dist_all_gather_func

    def gather(output, shard, group, **kwargs):
        return original(output, shard, group=group, **kwargs) if group.size() > 1 else None

    with mock.patch.object(module, "dist_all_gather_func", gather):
        yield


@contextlib.contextmanager
def no_collective():
    """Fail in every collective that begins."""

    def fail(*args, **kwargs):
        raise AssertionError("a collective began")

    names = "all_gather_into_tensor", "all_gather", "all_reduce", "broadcast", "barrier", "reduce_scatter_tensor"
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(torch.distributed, name, fail))
        module = sys.modules["megatron.core.distributed.param_and_grad_buffer"]
        stack.enter_context(mock.patch.object(module, "dist_all_gather_func", fail))
        yield


def export(chunks):
    """An exporter: the tensors of unwrapped chunks, one by one, by global name."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield global_name(chunk, name), parameter.detach().clone()


def whole(shards):
    """Return the tensors of a sharded state dict, by key."""
    return {key: leaf.data.detach().clone() for key, leaf in shards.items() if isinstance(leaf.data, torch.Tensor)}
