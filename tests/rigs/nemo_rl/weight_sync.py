"""NeMo-RL's own weight synchronizers, and its controller, between a policy and a generation that record calls.

Without a checkout of NeMo-RL, our imitation of the interface and of one transport.
"""

import asyncio
import importlib
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from megapatch.patches.nemo_rl.sync_weights_version import MODULE
from rigs.nemo_rl.worker import CHECKOUT, IMITATIONS, find_nemo_rl
from rigs.stand_ins import Anything, StandIns

NAME, PACKAGE = "nemo_rl.sync-weights-version", "nemo_rl.weight_sync"
CONTROLLER = "nemo_rl.algorithms.single_controller"
has_synchronizers = Path(CHECKOUT or IMITATIONS, f"{MODULE.replace('.', '/')}.py").exists()
needs_synchronizers = pytest.mark.skipif(not has_synchronizers, reason="this NeMo-RL has no synchronizers")


def find():
    find_nemo_rl()
    # What the controller's module imports, and the controller does not use.
    unused = ("aiohttp", "httpx", "nemo_rl.data.datasets", "torchdata")
    sys.meta_path.insert(0, StandIns(unused, lambda module, name: Anything(name, (), {})))


# ------------------------------------------------------------------------------------------ the edge
class Side:
    """A policy or a generation: records in `calls` what is called, and answers like workers that succeed."""

    def __init__(self, calls, succeeds=True):
        self.cfg, self._calls, self._succeeds = {}, calls, succeeds

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self._calls.append((name, threading.current_thread() is threading.main_thread()))
            return [self._succeeds]

        return call

    def get_free_memory_bytes(self):
        return 1 << 30

    def get_collective_sender_spec(self):
        return SimpleNamespace(buffer_size_bytes=1, num_buffers=1, nccl_peer=False)


TRANSPORTS = {"collective": ("vllm", False)}
if CHECKOUT:
    TRANSPORTS |= {"ipc": ("vllm", True), "http": ("sglang", True)}


def synchronizer(transport="collective", **options):
    """Return a synchronizer from NeMo-RL's own factory, and the list of its calls."""
    calls = []
    backend, colocated = TRANSPORTS[transport]
    made = importlib.import_module(f"{PACKAGE}.factory").create_weight_synchronizer(
        Side(calls), Side(calls, **options), backend, colocated, train_cluster=object(), inference_cluster=object()
    )
    # Ray waits for what are results already.
    sys.modules[type(made).__module__].ray = SimpleNamespace(get=lambda results: results)
    return made, calls


def awaited(call):
    """Await the call in an event loop, as controllers do."""

    async def run():
        return await call()

    return asyncio.run(run())


def controller_syncs():
    """Run the controller's own _sync_weights at version 5; return whether rollouts may continue, and the calls."""
    try:
        actor = importlib.import_module(CONTROLLER).SingleControllerActor
    except ModuleNotFoundError as error:
        if error.name != CONTROLLER:
            raise
        return None
    cls = actor.__ray_metadata__.modified_class.__ray_actor_class__
    made, calls = synchronizer()

    async def run():
        controller = object.__new__(cls)
        controller._weight_synchronizer, controller._trainer_version = made, 5
        controller._rollout_permitted = asyncio.Event()
        controller._inflight_rollouts = 0
        controller._gen = SimpleNamespace()
        if not first_controller():
            controller._master_config, controller._async_cfg = None, mock.Mock()
            controller._async_cfg.recompute_kv_cache_after_weight_updates = False
            controller._abort_stale_inflight = mock.AsyncMock(return_value=0)
            controller._rollout_manager = Side(calls)
        with mock.patch.object(sys.modules[CONTROLLER], "should_use_nemo_gym", return_value=False, create=True):
            await controller._sync_weights()
        return controller._rollout_permitted.is_set()

    return asyncio.run(run()), calls


def first_controller():
    """Return whether the checkout's controller passes a version; None if it has no controller."""
    file = Path(CHECKOUT or IMITATIONS) / f"{CONTROLLER.replace('.', '/')}.py"
    return "sync_weights(self._trainer_version)" in file.read_text() if file.exists() else None
