"""A local Ray, started once for all who want it; and asyncio, listened to."""

from __future__ import annotations

import gc

import pytest
from rigs.log import Log
from rigs.ray import ray_with


@pytest.fixture(scope="session")
def one_ray():
    with ray_with(num_cpus=3, configure_logging=False) as ray:
        yield ray


@pytest.fixture(scope="module")
def local_ray(one_ray, request):
    """Its workers cannot import the tests: what is in the module that asks travels by value."""
    one_ray.cloudpickle.register_pickle_by_value(request.module)
    yield
    one_ray.cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(autouse=True)
def nothing_is_lost(request):
    """No failure that nobody has seen, and no task that is pending when it is destroyed: asyncio logs these."""
    if "one_ray" in request.fixturenames:  # which has its own
        yield
        return
    with Log("asyncio") as log:
        yield
        gc.collect(1)
    assert not log.texts
