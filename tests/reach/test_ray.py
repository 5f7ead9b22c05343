"""megapatch in the workers of a real Ray: tasks, actors, actors of actors, workers that cannot have it.

One small cluster, to which the driver connects as one job after the other.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

if not (find_spec("ray") and find_spec("torch")):
    pytest.skip("needs Ray, and torch for what its workers import", allow_module_level=True)

from rigs.ray import TESTS, cluster, job, remotes

from megapatch._versions import exact_version
from megapatch.reach.ray import assert_consistent, compose_into_init, runtime_env
from megapatch.testing import run_ranks

HOOK = "worker_process_setup_hook"
DDP = "megatron.core.distributed.distributed_data_parallel"


def without_megapatch(folder):
    """The runtime environment of a worker that has all that this process has, except megapatch."""
    standard = Path(os.__file__).parent
    scripts = Path(sys.executable).parent  # pytest's own folder, where a file is called ray
    for place in map(Path, filter(os.path.isdir, sys.path)):
        if place not in (standard, standard / "lib-dynload", scripts):
            for one in place.iterdir():
                there = folder / one.name
                if not (one.name.startswith("megapatch") or there.exists()):
                    there.symlink_to(one)
    return {"py_executable": f"{sys.executable} -S", "env_vars": {"PYTHONPATH": str(folder)}}


def in_ray(rank, world_size, bare, fake):
    import ray
    from ray.job_config import JobConfig
    from ray.runtime_env import RuntimeEnv

    def known():
        env = {name: os.environ.get(name) for name in ("MINE", "OWN", "MEGAPATCH_DISABLE")}
        return {"active": "megapatch" in sys.modules, "hook found": os.environ.get("HOOK_FOUND"), **env}

    def hook():
        os.environ["HOOK_FOUND"] = "megapatch" if "megapatch" in sys.modules else "nothing"

    def importing():
        importlib.import_module(DDP)

    task, Actor, status = remotes(known)

    def nested():
        return ray.get(Actor.remote().call.remote())

    def patched():
        importlib.import_module(DDP)
        return status("megatron.forward-pre-hook", "megatron.prepare-grads-once")

    def restored():
        importlib.import_module(DDP)
        importlib.import_module("megapatch").restore("megatron.forward-pre-hook")

    def warned():
        told = Path(os.readlink("/proc/self/fd/2")).read_text()
        return [line for line in told.splitlines() if "megapatch" in line]

    def composing():
        from megapatch.reach.ray import compose_into_init

        plain = ray.init
        compose_into_init()
        return ray.init is plain

    def outcome(how, *args, **options):
        try:
            return how(*args, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    found = {}
    with cluster():
        with job():
            found["plain"] = ray.get(task.remote())
            found["too late"] = outcome(compose_into_init)

        # A hook by name, as verl's page has it: what the driver's shell has set stays there.
        with mock.patch.dict(os.environ, MEGAPATCH_DISABLE="of.the-shell"):
            with job(runtime_env={HOOK: "megapatch.activate"}):
                found["by name"] = ray.get(task.remote())
            with job(runtime_env={HOOK: "megapatch.activate", "env_vars": {"MEGAPATCH_DISABLE": "verl.*"}}):
                found["by name, told"] = ray.get(task.remote())

        compose_into_init()
        composed = ray.init
        compose_into_init()
        found["once"] = ray.init is composed
        found["client"] = outcome(ray.init, "ray://somewhere:10001")

        os.environ["MEGAPATCH_DISABLE"] = "megatron.prepare-grads-once"
        with job(runtime_env={HOOK: hook, "env_vars": {"MINE": "1"}}):
            found["again"] = outcome(compose_into_init)
            own = {"runtime_env": {"env_vars": {"OWN": "1"}}}
            actor = Actor.options(**own).remote()
            refs = {
                "task": task.remote(),
                "actor": Actor.remote().call.remote(),
                "nested": Actor.remote().call.remote(nested),
                "own": actor.call.remote(),
                "patched": actor.call.remote(patched),
                "composing": task.remote(composing),
            }
            without = Actor.options(runtime_env=bare).remote()
            refs.update(bare=without.call.remote(), warned=without.call.remote(warned))
            found.update({name: ray.get(ref) for name, ref in refs.items()})

            alike = [Actor.remote() for _ in range(2)]  # the first two have loaded nothing
            found["agree"] = outcome(assert_consistent, [*alike, actor])
            found["one without"] = outcome(assert_consistent, [*alike, without])
            ray.get(alike[1].call.remote(restored))
            found["one restored"] = outcome(assert_consistent, [actor, *alike])
            found["none"] = outcome(assert_consistent, [])

        path = os.environ.get("PYTHONPATH", "")
        strict = {"MEGAPATCH_STRICT": "1", "MEGAPATCH_ONLY": "megatron.forward-pre-hook"}
        strict["PYTHONPATH"] = os.pathsep.join([fake, path])
        config = JobConfig(runtime_env=RuntimeEnv(worker_process_setup_hook=importing, env_vars=strict))
        with job(job_config=config):
            found["strict"] = outcome(ray.get, Actor.remote().call.remote())

        # What `ray job submit` leaves in the driver's environment; Ray initializes itself.
        env_vars = {"PYTHONPATH": os.pathsep.join([TESTS, path]), "MEGAPATCH_DISABLE": "given", "MINE": "2"}
        told = json.dumps({"runtime_env": {HOOK: "rigs.ray.note_order", "env_vars": env_vars}, "metadata": {}})
        with mock.patch.dict(os.environ, RAY_JOB_CONFIG_JSON_ENV_VAR=told):
            with job(lambda: found.update(submitted=ray.get(task.remote()))):
                found["told"] = os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] == told
            found["conflict"] = outcome(ray.init, runtime_env={HOOK: hook})

    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    def folder(name):
        return tmp_path_factory.mktemp(name)

    fake = folder("fake")
    module = fake / f"{DDP.replace('.', '/')}.py"
    module.parent.mkdir(parents=True)
    for package in (module.parent, module.parent.parent):
        (package / "__init__.py").touch()
    module.write_text("class DistributedDataParallel: pass")
    given = without_megapatch(folder("bare")), str(fake)
    return run_ranks(in_ray, 1, *given, env={"MEGAPATCH_DISABLE": "", "MEGAPATCH_STRICT": ""})[0]


def worker(**known):
    nothing = {"active": True, "hook found": None, "MINE": None, "OWN": None, "MEGAPATCH_DISABLE": ""}
    return {**nothing, **known}


def test_composed_it_reaches_every_kind_of_worker(found):
    assert not found["plain"]["active"]  # what there is without
    disabled = "megatron.prepare-grads-once"
    expected = worker(MEGAPATCH_DISABLE=disabled, MINE="1", **{"hook found": "megapatch"})
    assert found["task"] == found["actor"] == found["nested"] == expected
    assert found["own"] == {**expected, "OWN": "1"}


def test_settings_reach_a_hook_by_name_only_as_env_vars(found):
    assert found["by name"] == worker(**{"hook found": None})
    assert found["by name, told"] == worker(MEGAPATCH_DISABLE="verl.*")


def test_a_real_target_is_patched_in_a_worker_and_settings_hold_there(found):
    assert found["patched"] == ["applied", "disabled"]


def test_a_worker_without_megapatch_warns_once_and_lives(found):
    assert not found["bare"]["active"]
    assert found["bare"]["hook found"] == "nothing"  # the chained one has run
    (warning,) = found["warned"]
    assert f"megapatch cannot be imported by {sys.executable}" in warning
    assert "nothing is patched in this Ray worker" in warning


def test_actors_agree_or_it_is_told_who_differs(found):
    assert found["agree"] is None
    assert found["one without"].startswith(
        "InconsistentError: megapatch is not the same in all actors: "
        f"megapatch is {exact_version()} on actors 0-1; not imported on actor 2 ({sys.executable})."
    )
    assert f"megatron.forward-pre-hook at {DDP} is applied ({DDP}:" in found["one restored"]
    assert " on actor 0 (" in found["one restored"]
    assert "disabled on actor 2 (restored in this process" in found["one restored"]
    assert found["none"].startswith("MegapatchError")


def test_a_strict_error_in_a_hook_ends_the_worker(found):
    assert found["strict"].startswith("ActorDiedError")
    assert f"StrictError: megatron.forward-pre-hook is refused at {DDP}" in found["strict"]


def test_composing_twice_too_late_or_in_a_worker(found):
    assert found["once"]
    assert found["again"] is None
    assert found["composing"]  # changes nothing there
    assert found["too late"].startswith("MegapatchError: Ray is initialized")


def test_with_a_jobs_own_environment(found):
    """Its hook comes after ours, its variables hold; Ray refuses, as ever, what both it and ray.init set."""
    assert found["submitted"] == worker(MINE="2", MEGAPATCH_DISABLE="given", **{"hook found": "megapatch"})
    assert found["told"]
    assert found["conflict"].startswith("ValueError: Failed to merge")


def test_ray_client_runs_no_hook_and_is_refused(found):
    assert found["client"].startswith("MegapatchError: Ray Client (ray://somewhere:10001)")


def test_uv_run_keeps_it(monkeypatch, tmp_path):
    from ray._private.runtime_env import uv_runtime_env_hook as uv

    command = ["uv", "run", "--with", "megapatch", "train.py"]
    monkeypatch.setattr(uv, "_get_uv_run_cmdline", lambda: command)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)  # where there is no project
    made = runtime_env()
    with_uv = uv.hook(made)
    assert with_uv.pop("py_executable").startswith("uv run --with megapatch")
    assert with_uv == {**made, "working_dir": str(tmp_path)}
