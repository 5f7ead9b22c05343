"""megapatch verify with one rank beside each actor of a real Ray."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

from megapatch._versions import find_module

if not (find_spec("ray") and find_module("megatron.core")):
    pytest.skip("needs Ray, and Megatron to verify", allow_module_level=True)

from rigs.ray import ray_with

from megapatch.errors import MegapatchError
from megapatch.reach.ray import verify

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")  # Ray's own


def actors_of(ray, **environment):
    @ray.remote(num_cpus=0, runtime_env={"env_vars": environment})
    class Actor:
        pass

    return [Actor.remote() for _ in range(2)]


@pytest.mark.nightly
def test_each_actor_gets_a_rank_with_its_own_environment():
    with ray_with() as ray:
        path = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        found = verify(actors_of(ray, **path), "megatron.nested-no-sync")
        assert (found["processes"], found["exit_code"]) == (2, 0)
        assert [check["outcome"] for check in found["checks"]] == ["repaired"]
        off = actors_of(ray, **path, MEGAPATCH_DISABLE="megatron.nested-no-sync")
        assert [check["outcome"] for check in verify(off, "megatron.nested-no-sync")["checks"]] == ["disabled"]
        with pytest.raises(MegapatchError, match=r"(?s)exit code 2 beside the first actor:.*no patch is called"):
            verify(off, "nothing.of-the-kind")


def test_without_actors():
    with pytest.raises(MegapatchError, match="at least one handle"):
        verify([])
