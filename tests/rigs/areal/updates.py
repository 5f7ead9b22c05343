"""AReaL's weight updates and checkpoints of the engine in `rigs.areal.engine`, to servers that may fail."""

import contextlib
import importlib
import sys
import tempfile
from concurrent.futures import Future
from types import SimpleNamespace
from unittest import mock

import torch

from rigs.areal.engine import CHECKPOINTER, ENGINE, ROLLOUT, parameters, wanted
from rigs.megatron.gathers import whole


class Servers:
    """A client of rollout servers, which copy what they are sent, and may fail. AReaL's own pauses them."""

    def __init__(self, fails=None):
        self.calls, self.loaded, self.fails = [], {}, fails
        self._engine = object.__new__(importlib.import_module(ROLLOUT).RemoteInfEngine)
        self._engine.backend = SimpleNamespace(
            get_pause_request=lambda: "pause", get_resume_request=lambda: "continue"
        )
        self._engine.config = SimpleNamespace(pause_grace_period=0)
        self._engine._run_request_on_all_servers = self._call

    def _call(self, name):
        self.calls.append(name)
        if name == self.fails:
            raise ConnectionError(name)

    def pause_generation(self):
        self._engine.pause_generation()

    def continue_generation(self):
        self._engine.continue_generation()

    def update_weights_from_distributed(self, meta, specs):
        self._call("update")
        self.names = [spec.name for spec in specs]
        return _done()

    def update_weights_from_disk(self, meta):
        self._call("disk")
        return _done()


def _done():
    future = Future()
    future.set_result(None)
    return future


def connect(engine, servers):
    """Let the engine send its weights to these servers, by its own update_weights()."""
    module = sys.modules[ENGINE]
    engine.rollout_engine, engine._check_rollout_engine_connected = servers, lambda: None
    engine.weight_update_group_initialized, engine.weight_update_group = True, None
    engine.weight_update_master_addr = engine.weight_update_master_port = None
    engine._cpu_group = torch.distributed.group.WORLD
    engine.is_pipeline_parallel_head = lambda: True
    module.convert_to_hf = lambda config, model, name, parameter, **ignored: [(name, parameter)]
    module.ParamSpec = SimpleNamespace
    return SimpleNamespace(type="xccl", weight_chunked_mem_mb=1000, version=1)


@contextlib.contextmanager
def broadcasts(servers):
    """Let the tensors that the engine broadcasts arrive at the servers."""

    def broadcast(tensor, source, group=None, async_op=False):
        servers.loaded[servers.names[len(servers.loaded)]] = tensor.detach().clone()
        return SimpleNamespace(wait=lambda: None)

    with mock.patch("torch.distributed.broadcast", broadcast):
        yield


def update(engine, servers, kind="xccl"):
    meta = connect(engine, servers)
    meta.type, meta.path = kind, tempfile.gettempdir()
    servers.loaded, wanted["saved"] = {}, lambda models: servers.loaded.update(parameters(engine))
    with broadcasts(servers):
        engine.update_weights(meta)
    return servers.loaded


class _Written(Exception):
    """Raised in place of writing a checkpoint."""


def checkpoint(engine):
    """AReaL's own save_checkpoint(), up to what is given to Megatron to write."""
    found = {}

    def write(sharded_state_dict, **ignored):
        found.update(whole(sharded_state_dict["model"]))
        raise _Written

    engine.checkpointer.use_dist_checkpointing = True
    with (
        contextlib.suppress(_Written),
        mock.patch.object(sys.modules[CHECKPOINTER], "save_dist_checkpointing", write),
    ):
        engine.checkpointer.save_checkpoint("nowhere", with_optimizer=False, with_rng=False)
    return found
