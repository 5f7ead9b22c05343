"""The runtime environment that brings megapatch into Ray's workers, and its hook, in this process: without Ray."""

from __future__ import annotations

import os
import sys

import pytest

from megapatch import MegapatchError
from megapatch.reach.ray import compose_into_init, runtime_env

HOOK = "worker_process_setup_hook"


def hook_of(env):
    return env[HOOK]


@pytest.fixture
def settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MEGAPATCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MEGAPATCH_DISABLE", "skyrl.*")
    monkeypatch.setenv("MEGAPATCH_STRICT", "1")


def test_what_is_there_is_kept_and_the_settings_are_added(settings):
    existing = {"env_vars": {"MINE": "1", "MEGAPATCH_DISABLE": ""}, "working_dir": "/somewhere"}
    made = runtime_env(existing)
    assert made["env_vars"] == {"MINE": "1", "MEGAPATCH_DISABLE": "", "MEGAPATCH_STRICT": "1"}
    assert made["working_dir"] == "/somewhere"
    assert existing == {"env_vars": {"MINE": "1", "MEGAPATCH_DISABLE": ""}, "working_dir": "/somewhere"}
    assert runtime_env(made) == made
    assert runtime_env()["env_vars"] == {"MEGAPATCH_DISABLE": "skyrl.*", "MEGAPATCH_STRICT": "1"}


def test_a_hook_that_is_there_runs_after_ours(monkeypatch):
    from rigs import ray as ray_rig

    called = []
    hook_of(runtime_env({HOOK: lambda: called.append("function")}))()
    monkeypatch.setattr(ray_rig, "note_order", lambda: called.append("name"))
    hook_of(runtime_env({HOOK: "rigs.ray.note_order"}))()
    assert called == ["function", "name"]
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        hook_of(runtime_env({HOOK: "no_such.hook"}))()


@pytest.mark.parametrize("wrong", ["a string", {HOOK: 1}])
def test_what_is_no_runtime_environment(wrong):
    with pytest.raises(MegapatchError, match=r"expected .* found"):
        runtime_env(wrong)


def test_without_ray_there_is_nothing_to_compose_into(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MegapatchError, match="needs Ray, which is not installed here"):
        compose_into_init()
