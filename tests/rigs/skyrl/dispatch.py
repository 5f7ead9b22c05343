"""SkyRL's WorkerDispatch around a worker of this process, which is every rank that the dispatch knows."""

import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import torch

from rigs.skyrl.worker import VOCABULARY, policy_loss, settings
from rigs.stand_ins import Anything, StandIns


class Handle:
    """A Ray actor's handle: a call is made at once, and its result is taken by ray.get(), a stand-in here."""

    def __init__(self, worker):
        self.worker = worker

    def __getattr__(self, name):
        method = {"__ray_call__": self._call, "save_memory_snapshot": lambda tag: None}.get(name)
        return SimpleNamespace(remote=method or getattr(self.worker, name))

    def _call(self, function):
        return function(self.worker)


def dispatch_for(release, worker, client=None, **placement):
    """Return SkyRL's own dispatch, whose group of actors hands calls to the worker; `ray` is a stand-in."""
    import ray

    ray.get, ray.put = lambda results: results, lambda data: data
    dispatching = importlib.import_module(f"{release.backend}.distributed.dispatch")
    workers = importlib.import_module(f"{release.backend}.workers.worker")
    module = importlib.import_module(f"{release.backend}.workers.worker_dispatch")
    rank = dispatching.MeshRank(dp=0, sp=0, tp=0, pp=0, world_size=1, dp_size=1, pp_size=1)
    group = object.__new__(workers.PPORayActorGroup)
    group.actor_infos = [dispatching.ActorInfo(Handle(worker), rank)]
    config = mock.MagicMock()
    config.trainer.placement = SimpleNamespace(
        **{"colocate_all": False, "colocate_policy_ref": False, **placement}
    )
    config.trainer.policy.model.lora.rank = 0
    config.generator.inference_engine.offload_kv_for_weight_sync = False
    return module.WorkerDispatch(config, group, ref_actor_group=group, inference_engine_client=client)


class Tokens(torch.nn.Module):
    """A model of FSDP's workers: the log-probability of a token depends on the token alone."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, sequences, num_actions, **options):
        logprobs = self.logits.log_softmax(0)[sequences[:, -num_actions:]]
        return logprobs, {"entropy": torch.zeros(sequences.shape)}


def fsdp_worker_for(release):
    """Return SkyRL's own worker for FSDP, without what shards its model over GPUs."""
    module = importlib.import_module(f"{release.backend}.workers.worker")
    worker = object.__new__(module.PolicyWorkerBase)
    worker.cfg, worker.policy_loss_fn, worker.record_memory = settings(), policy_loss, False
    worker.model = Tokens()
    worker.optimizer = torch.optim.SGD(worker.model.parameters(), lr=1.0)
    worker.scheduler = SimpleNamespace(step=lambda: None, get_last_lr=lambda: [1.0])
    # Only now: Megatron would have used it.
    sys.meta_path.append(StandIns({"flash_attn"}, lambda module, name: Anything(name, (), {})))
    strategy = importlib.import_module(f"{release.backend}.distributed.fsdp_strategy")
    worker.strategy = object.__new__(strategy.FSDPStrategy)
    worker.strategy.max_norm, worker.strategy.world_size = 1e9, 1
    worker.mesh_rank = SimpleNamespace(dp_size=1)
    worker.device_mesh = SimpleNamespace(get_group=lambda name: None)
    worker._micro_batches_accumulated = 0
    return worker
