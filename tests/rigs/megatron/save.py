"""Saves of one strategy by the real dist_checkpointing, and the calls that planning each of them took."""

import functools
import importlib
import inspect
import itertools
import os
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace

import numpy
import torch
from torch.distributed.checkpoint import FileSystemReader

from megapatch._versions import version_of
from megapatch.testing import init_parallel
from rigs.megatron.options import attempt, quick_writer

STRICTNESSES = (
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "return_unexpected",
    "return_all",
    "ignore_all",
)
"""How strictly a checkpoint is loaded, by --dist-ckpt-strictness; the first is the default."""
CALLS = Counter()
"""The calls so far, of the functions that `prepare` counts."""

# What is saved, by the names of its parts; `tree` says what these are.
BASE = {"weights": {}, "shared": {"replicated": True}, "state": {"object": True}}
STATE_ON_ONE = {**BASE, "new": {"object": True, "on": 1}}
TENSOR_ON_ONE = {**BASE, "new": {"on": 1}}
SHARED = {**BASE, "new": {"replicated": True}}
MORE = {**BASE, "new": {}}

# What planning calls on a rank.
LOCAL = {"create_local_plan": 1}
DISTRIBUTED = {"determine_main_replica_uniform_distribution": 1}

_steps = itertools.count(1)


class Saves:
    """Saves of one strategy, each a step of its own in a directory of its own. Parts are those of `tree`.

    cached   whether the structure is taken for constant
    writer   from 0.17 on there are two: Megatron's own, and NVRx's
    """

    def __init__(self, rank, folder, parallel=False, cached=True, writer="mcore"):
        self.rank, self.folder, self.writer = rank, folder, writer
        self.strategy = self.base = strategies("torch").TorchDistSaveShardedStrategy(
            "torch_dist", 1, thread_count=1, cached_metadata=cached
        )
        if parallel:
            wrapper = strategies("fully_parallel").FullyParallelSaveStrategyWrapper
            self.strategy = wrapper(self.base, None, do_cache_distribution=True)

    def plan(self, parts, at_once=False):
        """Plan a save, and write it only if `at_once`."""
        step = next(_steps)
        path, request = self.plan_tree(tree(self.rank, parts, step), step, at_once)
        return SimpleNamespace(path=path, step=step, parts=parts, request=request)

    def plan_tree(self, tree, step=None, at_once=False):
        """Plan a save of any state dict; return its path and what there is to be written."""
        from megatron.core import dist_checkpointing

        step = step or next(_steps)
        path = f"{self.folder}/{step}"
        if self.rank == 0:
            os.makedirs(path)
        torch.distributed.barrier()
        kwargs = {"async_sharded_save": not at_once, "validate_access_integrity": False}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            kwargs["async_strategy"] = self.writer
        return path, dist_checkpointing.save(tree, path, self.strategy, **kwargs)

    def plan_often(self, parts, times=3):
        """Plan until the plan is validated; return the calls that it took."""
        CALLS.clear()
        for _ in range(times):
            self.plan(parts)
        return dict(CALLS)

    def save(self, parts):
        """Save and load; return the error or difference in words, or None, and the calls that planning took."""
        CALLS.clear()
        error, planned = attempt(self.plan, parts)
        calls = dict(CALLS)
        if error:
            if "Timed out" in planned:
                raise AssertionError(f"this rank plans alone: the other one reuses its plan.\n{planned}")
            return f"{error}: {planned}", calls
        planned.request.execute_sync()
        return self.load(planned), calls

    def change(self, before, after, saves=2):
        """Plan `before` three times, then save `after` `saves` times."""
        return self.plan_often(before), *[self.save(after) for _ in range(saves)]

    def load(self, planned):
        """Return what the checkpoint lacks, in words, or None."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        torch.distributed.barrier()
        error, loaded = attempt(dist_checkpointing.load, tree(self.rank, planned.parts, 0), planned.path)
        if error:
            return f"{error}: {loaded.strip().splitlines()[-1]}"
        (expected,) = tree(self.rank, planned.parts, planned.step)["nested"]
        for name, leaf in expected.items():
            value = loaded["nested"][0][name]
            tensor = not isinstance(leaf, ShardedObject)
            if not (torch.equal(value, leaf.data) if tensor else value == leaf.data):
                return f"{name} is {value}"
            if tensor and (dtype := metadata(planned.path, name)) != leaf.dtype:
                return f"{name} is {dtype} by its metadata"
        return None


def metadata(path, name=None):
    """Return the checkpoint's metadata, or a tensor's dtype in it."""
    found = FileSystemReader(path).read_metadata()
    return found if name is None else found.state_dict_metadata[name].properties.dtype


def strategies(name):
    return importlib.import_module(f"megatron.core.dist_checkpointing.strategies.{name}")


def tree(rank, parts, step):
    """Return a rank's state dict. A part is a tensor of which each rank has half, except as its entry says.

    object      an object of each rank
    on          the only rank that has this part
    replicated  a tensor of both ranks; rank `main` saves it
    swapped     the ranks have each other's half
    size, dtype of a rank's part
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    leaves = {}
    for name, how in parts.items():
        if how.get("on", rank) != rank:
            continue
        if "object" in how:  # its content grows, which is no change of structure
            shape, offset = ((1,), (0,)) if "on" in how else ((2,), (rank,))
            leaves[name] = ShardedObject(name, [(rank, step)] * step, shape, offset)
            continue
        data = torch.full((how.get("size", 4),), float(100 * step), dtype=how.get("dtype", torch.float32))
        if "on" in how:
            leaves[name] = ShardedTensor.from_rank_offsets(name, data)
        elif "replicated" in how:
            replica = int(rank != how.get("main", 0))
            leaves[name] = ShardedTensor.from_rank_offsets(name, data, replica_id=replica)
        else:
            place = 1 - rank if "swapped" in how else rank
            leaves[name] = ShardedTensor.from_rank_offsets(name, data + place, (0, place, 2))
    return {"nested": [leaves], "common": "not sharded"}


def count(owner, name):
    """Count the calls of a function of `owner` in CALLS from now on."""
    original = getattr(owner, name)

    def counted(*args, **kwargs):
        CALLS[name] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counted)


ALONE = timedelta(seconds=30)
"""How long a rank waits for the others in a collective. It takes milliseconds, unless one of them plans alone."""


def prepare():
    init_parallel()
    torch.distributed.distributed_c10d._set_pg_timeout(ALONE)  # there is no public way
    quick_writer()
    for name in ("create_local_plan", "create_global_plan"):
        count(strategies("torch").MCoreSavePlanner, name)
    count(strategies("fully_parallel"), "determine_main_replica_uniform_distribution")
    count(torch.distributed, "all_reduce")
    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod  # what 0.13 distributes with; numpy 2 has dropped it


@functools.cache
def minor():
    """Return the minor version of Megatron, whose major version is 0."""
    return int(version_of("megatron-core", "megatron.core").split(".")[1])


def has_working_writer():
    """Return whether Megatron's writer of checkpoints works with this torch: 0.12's does not."""
    return minor() >= 13


def planning(rank, again=0, collectives=0, **calls):
    """Return the calls expected on a rank: only the coordinator makes a global plan, `again` times."""
    counted = {"create_global_plan": again if rank == 0 else 0, "all_reduce": collectives, **calls}
    return {name: times for name, times in counted.items() if times}
