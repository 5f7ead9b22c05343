"""verl's own CheckpointEngineManager over replicas, worker groups and a Ray that are ours, and can fail."""

import asyncio
import functools
import importlib
import inspect
from types import SimpleNamespace
from unittest import mock

from megapatch import apply, report, restore
from rigs.log import Log

TAKES = {"release_kv_cache": "cache", "sleep": "cache", "abort_all_requests": "serving"}
GIVES = {"resume_kv_cache": "cache", "wake_up": "cache", "resume_generation": "serving"}
PLACES = (
    "abort_all_requests of 1",
    "release_kv_cache of 1",
    "build",
    "transfer",
    "finalize",
    "resume_kv_cache of 1",
    "resume_generation of 1",
)


class Failure(Exception):
    """The text is the place where it was raised."""


class Replica:
    """A rollout replica that has a KV cache and serves requests. Calls of the second one take longer to fail."""

    workers = ()

    def __init__(self, number, plan):
        self.number, self.plan = number, plan
        self.cache = self.serving = True
        self.calls = []

    def __getattr__(self, name):
        if name not in {**TAKES, **GIVES}:
            raise AttributeError(name)

        async def call(**ignored):
            self.calls.append(name)
            for _ in range(3 if self.number == 0 else 1):  # the first is still at it when the second one fails
                await asyncio.sleep(0)
            self.plan.reach(f"{name} of {self.number}")
            if name == "resume_generation":
                assert self.cache, "a replica without a KV cache was asked to generate"
            setattr(self, {**TAKES, **GIVES}[name], name in GIVES)

        return call


class Plan:
    """Where the sync fails, or is cancelled."""

    def __init__(self, place, error=Failure):
        self.place, self.error, self.task = place, error, None

    def reach(self, place):
        if place != self.place:
            return
        if self.error is asyncio.CancelledError:
            self.task.cancel()
        else:
            raise self.error(place)


class Group:
    """A group of workers."""

    world_size = 1

    def __init__(self, plan, **ignored):
        self.plan = plan

    def execute_checkpoint_engine(self, method, **ignored):
        self.plan.reach("finalize" if method == ["finalize"] else "build")
        return [None]

    def update_weights(self, **ignored):
        self.plan.reach("transfer")
        return [{"seconds": 1.0}]


def manager_for(plan):
    module = importlib.import_module("verl.checkpoint_engine.base")
    replicas = [Replica(number, plan) for number in range(2)]
    found = object.__new__(module.CheckpointEngineManager)
    found.backend, found.replicas = "nccl", replicas
    found.backend_cls = SimpleNamespace(build_topology=lambda *ignored: ({"rank": [0]}, {"rank": [0]}))
    found.actor_wg = found.trainer = Group(plan)
    return found


def sync(plan, call):
    """Call update_weights(); return its result, or what it raised, and the state of the replicas."""
    module = importlib.import_module("verl.checkpoint_engine.base")
    manager = manager_for(plan)
    with (
        mock.patch.object(module.ray, "get", lambda results: results, create=True),
        mock.patch.object(module, "RayWorkerGroup", functools.partial(Group, plan)),
        mock.patch.object(module, "RayClassWithInitArgs", dict),
    ):
        try:
            result, error = call(manager, plan), None
        except BaseException as raised:
            result, error = None, raised
    own = [name for one in manager.replicas for name in vars(one) if name in {**TAKES, **GIVES}]
    assert not own, "a replica keeps what was to note its calls"
    return {
        "result": result,
        "error": error and (type(error).__name__, str(error)),
        "serving": [replica.serving for replica in manager.replicas],
        "cache": [replica.cache for replica in manager.replicas],
        "calls": [replica.calls for replica in manager.replicas],
    }


def awaited(manager, plan):
    async def main():
        plan.task = asyncio.current_task()
        return await manager.update_weights(global_steps=1)

    return asyncio.run(main())


def blocking(manager, plan):
    return manager.update_weights(global_steps=1)


def from_a_callback(manager, plan):
    """Called, and not awaited, where an event loop is running."""

    async def main():
        return not_a_coroutine()

    def not_a_coroutine():
        return manager.update_weights(global_steps=1)

    return asyncio.run(main())


CALLS = {"awaited": awaited, "blocking": blocking, "from a callback": from_a_callback}


def found_by(rank, world_size):
    """Return each sync's events, by the place that fails and the way of calling, without the patch and with it."""
    log, found = Log(), {}
    module = importlib.import_module("verl.checkpoint_engine.base")
    restore()
    original = vars(module.CheckpointEngineManager)["update_weights"]
    for name, switch in (("with", apply), ("without", restore)):
        switch()
        found[name] = {
            (how, place): sync(Plan(place), call) for how, call in CALLS.items() for place in (None, *PLACES)
        }
        found[name, "cancelled"] = [
            sync(Plan(place, asyncio.CancelledError), awaited) for place in ("transfer", "abort_all_requests of 0")
        ]
        found[name, "interrupted"] = sync(Plan("transfer", KeyboardInterrupt), blocking)
        if name == "with":
            found["logged"] = len(log.texts), log.texts[-1]
            found["signature"] = str(inspect.signature(module.CheckpointEngineManager.update_weights))
            (patch,) = (one for one in report().patches if one.patch.name == "verl.weight-sync-resume")
            found["status"] = patch.status.value
    found["restored"] = vars(module.CheckpointEngineManager)["update_weights"] is original
    return found
