"""NeMo-RL's policies, on the driver's side, with real workers around a tiny GPT; or our imitation.

Every rank runs the driver's program and is one of its workers. Ray has a stand-in: a call runs in the rank of its
worker, and `ray.get` exchanges the answers between all ranks, which must wait in the same order.
"""

import importlib
import importlib.util
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rigs.imported import after_megatron
from rigs.nemo_rl.steps import LOSSES, SIZE
from rigs.nemo_rl.worker import CHECKOUT, IMITATIONS, batch, find_nemo_rl, worker_for

TQ_POLICY = Path(CHECKOUT or IMITATIONS, "nemo_rl/models/policy/tq_policy.py")
OF_MAIN = TQ_POLICY.exists() and "def begin_train_step" in TQ_POLICY.read_text()
POLICIES = ("Policy", "TQPolicy") if TQ_POLICY.exists() else ("Policy",)
not_main = pytest.mark.skipif(OF_MAIN, reason="main has it")
AXES = ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel")
PARTITION = "train"


class Table(dict):
    """The part of tensordict.TensorDict that NeMo-RL's data plane uses."""

    def __init__(self, columns, batch_size=None):
        super().__init__(columns)

    def keys(self, **ignored):
        return super().keys()

    def items(self, **ignored):
        return super().items()


def find_policies():
    """Make the policies importable, with Ray within this process: the setup of a rank."""
    find_nemo_rl()
    if CHECKOUT:
        importlib.import_module("tensordict").TensorDict = Table
    if importlib.util.find_spec("ray") is None:
        sys.modules["ray"] = SimpleNamespace(remote=lambda **ignored: lambda cls: cls)
    ray = importlib.import_module("ray")
    ray.put, ray.get = (lambda value: value), _get


if not CHECKOUT:  # whose stand-ins come before Megatron
    after_megatron(find_policies)


def policy_for(model, name="Policy", settings=None):
    """Return a Policy or TQPolicy as its __init__ leaves it; this rank's worker is `policy.worker_group.mine`.

    settings   more of the policy's configuration, section by section
    """
    from megatron.core import parallel_state

    tq = name == "TQPolicy"
    module = importlib.import_module(f"nemo_rl.models.policy.{'tq' if tq else 'lm'}_policy")
    policy = object.__new__(getattr(module, name))
    worker = worker_for(model, settings)
    policy.cfg = worker.cfg
    policy.sharding_annotations = _sharding()
    policy.worker_group = _group(policy.sharding_annotations, worker)
    policy.use_dynamic_batches = policy.cfg["dynamic_batching"]["enabled"]
    policy.use_sequence_packing = policy.cfg["sequence_packing"]["enabled"]
    keys = {"input_key": "input_ids", "input_lengths_key": "input_lengths", "max_tokens_per_microbatch": 0}
    policy.dynamic_batching_args = {**keys, "sequence_length_round": 4}
    packing = {"algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 1}
    policy.sequence_packing_args = {**keys, **packing}
    tracker = importlib.import_module("nemo_rl.utils.flops_tracker").FLOPTracker
    policy.debug_payload_metrics = False  # main's
    policy.flops_tracker = tracker("tiny", flops_formula=lambda one: float(one.gbs * one.enc_seq_len))
    if tq:
        noop = importlib.import_module("nemo_rl.data_plane.adapters.noop")
        policy.dp_client = worker._dp_client = noop.NoOpDataPlaneClient()
        policy.dp_cfg, policy.tq_partition_id, policy._router_replay_enabled = {}, PARTITION, False
        worker._replica_group_cache = parallel_state.get_pipeline_model_parallel_group()  # or NeMo-RL wants NCCL
    return policy


def samples(policy, step, size):
    """Return the samples of all data-parallel ranks, `size` of each."""
    return batch(step, size * policy.sharding_annotations.get_axis_size("data_parallel"), rank=0)


def put(policy, data):
    """Put samples into the data plane, and return their meta."""
    policy.prepare_step(data.size)
    column_io = importlib.import_module("nemo_rl.data_plane.column_io")
    names = [f"sample {index}" for index in range(data.size)]
    return column_io.kv_first_write(data, sample_ids=names, dp_client=policy.dp_client, partition_id=PARTITION)


# ---------------------------------------------------------------- steps
def loss():
    return LOSSES["policy gradient"]()


def whole(policy, data):
    data = put(policy, data) if hasattr(policy, "dp_client") else data
    train = policy.train_from_meta if hasattr(policy, "dp_client") else policy.train
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not know how fast a CPU is
        return train(data, loss(), gbs=data.size)


def in_slices(sizes, between=lambda policy: None):
    """Return a function that takes a step in slices; `between` is called before each but the first."""

    def split(policy, data):
        policy.begin_train_step(loss(), gbs=data.size)
        for index, one in enumerate(sliced(policy, data, sizes)):
            if index:
                between(policy)
            assert train_slice(policy)(one) is None
        return policy.finish_train_step()

    return split


def train_slice(policy):
    return policy.train_microbatches_from_meta if hasattr(policy, "dp_client") else policy.train_microbatches


def sliced(policy, data, sizes):
    data = put(policy, data) if hasattr(policy, "dp_client") else data
    ranks, at = data.size // SIZE, 0
    for size in sizes:
        yield data.slice(at * ranks, (at + size) * ranks)
        at += size


# ---------------------------------------------------------------- Ray, within the ranks
class Worker:
    """The handle of a worker, which is in one of the ranks."""

    def __init__(self, rank, worker):
        self.rank, self.worker, self.calls = rank, worker, []

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda **kwargs: Call(self, method, kwargs))


class Call:
    """A call of a worker: (result, None), or (None, error) if it raised; None for another rank's worker."""

    def __init__(self, handle, method, kwargs):
        handle.calls.append((method, kwargs))
        self.said = None
        if handle.rank == torch.distributed.get_rank():
            try:
                self.said = getattr(handle.worker, method)(**kwargs), None
            except Exception as error:
                self.said = None, error


def _get(calls):
    mine = [call.said for call in calls]
    ranks = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, mine)
    found = [next(one for one in said if one is not None) for said in zip(*ranks, strict=True)]
    for _, error in found:
        if error is not None:
            raise error
    return [answer for answer, _ in found]


def _sharding():
    from megatron.core import parallel_state

    size = torch.distributed.get_world_size()
    shape = (parallel_state.get_pipeline_model_parallel_world_size(), -1, 1, 1)
    sharding = importlib.import_module("nemo_rl.distributed.named_sharding").NamedSharding
    return sharding(layout=np.arange(size).reshape(shape), names=list(AXES))


def _group(sharding, worker):
    group = object.__new__(importlib.import_module("nemo_rl.distributed.worker_groups").RayWorkerGroup)
    size = torch.distributed.get_world_size()
    group._workers = [Worker(rank, worker) for rank in range(size)]
    group.mine = worker
    group.sharding_annotations = sharding
    group.cluster = SimpleNamespace(world_size=lambda: size)
    group.shutdown = lambda **ignored: True  # a policy that goes away calls it
    return group
