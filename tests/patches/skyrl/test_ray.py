"""A client of weight syncs that is a Ray actor, in real Ray."""

import asyncio
from importlib.util import find_spec

import pytest
from rigs.ray import ray_with

from megapatch.testing import run_ranks

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def in_ray(rank, world_size):
    import ray

    @ray.remote(num_cpus=0)
    class Client:
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
        client, found = Client.remote(), {}
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
    return run_ranks(in_ray, 1)[0]


@pytest.mark.parametrize("how", ["async with", "with"])
def test_the_client_may_be_an_actor(found, how):
    told = found[how]
    assert told["good"] == (True, ["pause", "resume"])
    assert told["failed"] == ("sync", ["pause", "resume"])
    assert told["cannot"] == told["missing"] == (False, ["pause"])
    error, calls = told["pause fails"]
    assert "gone" in error
    assert calls == ["pause", "resume"]
