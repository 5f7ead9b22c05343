"""In Ray's processes: SkyRL's dispatch lives in a task, its wrapper in an actor, and neither is the driver.

worker_process_setup_hook activates megapatch there. Ray is real, and so are SkyRL's classes; what they talk to is
not. The dispatch is as in test_weight_sync_pause.py.
"""

import asyncio
import os
import sys
from importlib.util import find_spec

import pytest
from rigs.ray import TESTS, ray_with
from rigs.skyrl.releases import RELEASES, has_correctness_fixes, needs_skyrl

from megapatch.testing import run_ranks

pytestmark = [needs_skyrl, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]


def first(releases):
    """A checkout that has the defect, if there is one."""
    return next(iter(sorted(releases, key=has_correctness_fixes)), None)


DISPATCH = first(
    one for one in RELEASES if one.has("workers/worker_dispatch", "inference_engines/inference_engine_client")
)
WRAPPER = first(
    one
    for one in RELEASES
    if one.has("workers/megatron/megatron_model_wrapper")
    and not has_correctness_fixes(one)
    and one.name != "skyrl_train-0.2.0"  # whose wrapper takes other arguments
)


def in_ray(rank, world_size, dispatch, wrapper):
    import ray

    def find(release):
        """From now on this worker can import the release; whether megapatch was there before."""
        active = "megapatch" in sys.modules
        sys.path.insert(0, TESTS)
        os.environ["SKYRL_RELEASE"] = release.folder
        from rigs.skyrl.releases import find_skyrl

        find_skyrl(real=["ray"])
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as moved

        # where SkyRL finds it in the Ray that it pins (ray.util has a function of the module's name)
        sys.modules["ray.util.placement_group"].PlacementGroupSchedulingStrategy = moved
        return active

    @ray.remote(num_cpus=0)
    class Policy:
        """A GPU worker, with SkyRL's wrapper; it takes part in broadcasts."""

        def __init__(self, release):
            self.active = find(release)
            self.release = release
            self.broadcasts = 0

        def broadcast_to_inference_engines(self):
            self.broadcasts += 1

        def wrapped(self):
            from types import SimpleNamespace

            config = SimpleNamespace(grad_scale_func=None, finalize_model_grads_func=None)
            optimizer = SimpleNamespace(scale_loss=lambda loss: 1024 * loss)
            self.release.wrapped([SimpleNamespace(config=config)], optimizer)
            return self.active, config.grad_scale_func is optimizer.scale_loss, self.broadcasts

    @ray.remote(num_cpus=0)
    def synced(release, policy):
        """In the task, as skyrl_entrypoint: two syncs, of which the first one fails half way."""
        active = find(release)
        import importlib
        from unittest import mock

        from rigs.skyrl.engines import Engines, outcome, save_without_pause
        from rigs.skyrl.releases import has_correctness_fixes

        import megapatch

        module = importlib.import_module(f"{release.backend}.workers.worker_dispatch")
        if has_correctness_fixes(release):
            megapatch.restore()
            module.WorkerDispatch.save_weights_for_sampler = save_without_pause
            megapatch.apply()

        engines = Engines(release)
        engines.failing_broadcasts = (1,)

        class Group:
            def async_run_ray_method(self, how, name, *args):
                engines.broadcast()
                return [getattr(policy, name).remote()]

        config = mock.MagicMock()
        config.trainer.placement.colocate_all = False
        dispatch = module.WorkerDispatch(config, Group(), inference_engine_client=engines.client)
        errors = [outcome(dispatch.save_weights_for_sampler()) for _ in range(2)]
        return active, errors, engines.told()

    @ray.remote(num_cpus=0)
    class Client:
        """One that is an actor itself."""

        def begin(self, error):
            self.error, self.calls = error, []

        async def pause_generation(self):
            self.calls.append("pause")
            if self.error is not None:
                raise self.error

        def resume_generation(self):
            self.calls.append("resume")

        def told(self):
            return self.calls

    async def in_loop(client, error):
        from megapatch.weight_sync import paused_generation

        async with paused_generation(client) as paused:
            if error is not None:
                raise error
        return paused

    def blocking(client, error):
        from megapatch.weight_sync import paused_generation

        with paused_generation(client) as paused:
            if error is not None:
                raise error
        return paused

    def attempt(how, raising=None, error=None):
        ray.get(client.begin.remote(raising))
        try:
            result = how(client, error)
        except Exception as caught:
            result = str(caught)
        return result, ray.get(client.told.remote())

    with ray_with("megapatch.activate"):
        found = {}
        policy = Policy.remote(wrapper or dispatch)
        found["dispatch"] = ray.get(synced.remote(dispatch, policy))
        if wrapper is not None:
            found["wrapper"] = ray.get(policy.wrapped.remote())
        client = Client.remote()
        for name, how in {
            "async with": lambda client, error: asyncio.run(in_loop(client, error)),
            "with": blocking,
        }.items():
            found[name] = {
                "good": attempt(how),
                "failed": attempt(how, error=ValueError("sync")),
                "cannot": attempt(how, raising=NotImplementedError()),
                "missing": attempt(how, raising=AttributeError("'X' object has no attribute 'abort_generation'")),
                "pause fails": attempt(how, raising=OSError("gone")),
            }
        return found


@pytest.fixture(scope="module")
def found():
    return run_ranks(in_ray, 1, DISPATCH, WRAPPER, timeout=240)[0]


@pytest.mark.skipif(DISPATCH is None, reason="no release with a dispatch is here")
@pytest.mark.parametrize(
    "of", ["imitation" if DISPATCH is not None and has_correctness_fixes(DISPATCH) else "checkout"]
)
def test_in_a_task_generation_is_paused_and_resumed(found, of):
    active, errors, told = found["dispatch"]
    assert active
    assert errors == ["BroadcastFailed", None]
    assert told["calls"] == ["pause", "broadcast", "resume"] * 2
    assert told["serving"] == [True, True]
    assert told["synced"] and not told["marked"]


@pytest.mark.skipif(WRAPPER is None, reason="no release without the fix is here")
def test_in_an_actor_the_wrapper_is_patched(found):
    active, scaled, broadcasts = found["wrapper"]
    assert active
    assert scaled
    assert broadcasts == 1


@pytest.mark.parametrize("how", ["async with", "with"])
def test_the_client_may_be_an_actor(found, how):
    told = found[how]
    assert told["good"] == (True, ["pause", "resume"])
    assert told["failed"] == ("sync", ["pause", "resume"])
    assert told["cannot"] == told["missing"] == (False, ["pause"])
    error, calls = told["pause fails"]
    assert "gone" in error
    assert calls == ["pause", "resume"]
