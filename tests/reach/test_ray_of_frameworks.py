"""megapatch in the workers of a real Ray that slime, SkyRL and NeMo-RL start in their own ways."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest

if not (find_spec("ray") and find_spec("torch")):
    pytest.skip("needs Ray, and torch for what its workers import", allow_module_level=True)

from rigs.ray import TESTS, cluster, job, remotes
from rigs.skyrl.releases import RELEASES, has_correctness_fixes
from rigs.variables import folder_in

from megapatch.reach.ray import compose_into_init
from megapatch.testing import run_ranks

NEMO_RL, SLIME = folder_in("NEMO_RL_CHECKOUT"), folder_in("SLIME_CHECKOUT")
HAVE_A_DEFECT = [
    one
    for one in RELEASES
    if one.has("workers/megatron/megatron_model_wrapper") and not has_correctness_fixes(one)
]
SKYRL = HAVE_A_DEFECT[-1] if HAVE_A_DEFECT else None


def in_ray(rank, world_size, slime, skyrl, log):
    import ray

    def known():
        return {"active": "megapatch" in sys.modules}

    task, Actor, status = remotes(known)

    def slimes_way(path, of_checkout):
        sys.path[:0] = [TESTS, path]
        from rigs.stand_ins import StandIns

        only_with_gpus = ("mooncake", "sglang", "sglang_router", "torch_memory_saver")
        sys.meta_path.append(StandIns(only_with_gpus, lambda module, name: type(name, (), {})))
        actor = importlib.import_module("slime.backends.megatron_utils.actor")
        before = "megapatch" in sys.modules
        if of_checkout:
            load_function = importlib.import_module("slime.utils.misc").load_function
            load_function("megapatch.activate")(SimpleNamespace())
        else:
            importlib.import_module("megapatch").activate(SimpleNamespace())
        return before, status("slime.train-reentry"), hasattr(actor.train, "__wrapped__")

    def skyrls_wrapper(release):
        before = "megapatch" in sys.modules
        sys.path.insert(0, TESTS)
        os.environ["SKYRL_RELEASE"] = release.folder
        from rigs.skyrl.releases import find_skyrl

        find_skyrl(real=["ray"])
        importlib.import_module(f"{release.backend}.workers.megatron.megatron_model_wrapper")
        return before, status("skyrl.grad-scale")

    found = {}
    with cluster():
        with job():
            found["slime"] = ray.get(Actor.remote().call.remote(slimes_way, *slime))

        imitations = f"{TESTS}/imitations"
        sys.path.insert(0, imitations)
        actor = importlib.import_module("slime.backends.megatron_utils.actor")

        @ray.remote(num_cpus=0)
        class Late(actor.MegatronTrainRayActor):
            """Ray has this actor's methods before it activates megapatch."""

            def __init__(self):
                self.args, self._active_model_tag = SimpleNamespace(offload_train=False), "ref"
                self.weight_updater = SimpleNamespace(update_weights=lambda: None)

            def init(self):
                importlib.import_module("megapatch").activate(self.args)

            def _switch_model(self, target_tag):
                self._active_model_tag = target_tag

            def loaded(self):
                return self._active_model_tag

        with job(runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([imitations, *sys.path])}}):
            late = Late.remote()
            calls = [late.loaded.remote(), late.init.remote(), late.update_weights.remote(), late.loaded.remote()]
            found["late"] = ray.get(calls)[::3]

        compose_into_init()
        if skyrl is not None:
            from rigs.skyrl.releases import find_skyrl

            os.environ["SKYRL_RELEASE"] = skyrl.folder
            find_skyrl(real=["ray"])
            # where SkyRL finds it in the Ray that it pins
            group = importlib.import_module("ray.util.placement_group")
            moved = importlib.import_module("ray.util.scheduling_strategies")
            vars(group).update(PlacementGroupSchedulingStrategy=moved.PlacementGroupSchedulingStrategy)
            utils = importlib.import_module(f"{skyrl.trainer}.utils.utils")
            config = mock.MagicMock()  # of a run with one GPU a node
            config.trainer.log_path = log
            config.generator.inference_engine_tensor_parallel_size = 1
            config.generator.inference_engine.tensor_parallel_size = 1
            for role in ("policy", "critic", "ref"):
                setattr(config.trainer.placement, f"{role}_num_gpus_per_node", 1)
            with job(lambda: utils.initialize_ray(config)):
                found["skyrl"] = ray.get([task.remote(), Actor.remote().call.remote(skyrls_wrapper, skyrl)])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    slime = SLIME or f"{TESTS}/imitations", bool(SLIME)
    log = str(tmp_path_factory.mktemp("log"))
    env = {"MEGAPATCH_DISABLE": "", "MEGAPATCH_STRICT": ""}
    return run_ranks(in_ray, 1, slime, SKYRL, log, env=env)[0]


@pytest.mark.parametrize("of", ["checkout" if SLIME else "imitation"])
def test_slimes_init_hook_patches_what_its_actor_has_imported(found, of):
    before, statuses, train_is_wrapped = found["slime"]
    assert not before
    assert statuses == ["applied"]
    assert train_is_wrapped


def test_what_an_actor_patches_late_is_in_effect_where_ray_calls_it(found):
    assert found["late"] == ["ref", "actor"]


@pytest.mark.skipif(SKYRL is None, reason="no release of SkyRL with a defect is here")
def test_skyrls_own_initialize_ray(found):
    task, (before, statuses) = found["skyrl"]
    assert task["active"]
    assert before
    assert statuses == ["applied"]


def in_nemo_rls_ray(rank, world_size):
    import ray

    @ray.remote(num_cpus=0)
    def known():
        return "megapatch" in sys.modules, os.environ["MEGAPATCH_DISABLE"]

    init_ray = importlib.import_module("nemo_rl.distributed.virtual_cluster").init_ray
    compose_into_init()
    with cluster(), job(init_ray):
        return ray.get(known.remote())


@pytest.mark.skipif(not NEMO_RL, reason="NEMO_RL_CHECKOUT is not set")
def test_nemo_rls_own_init_ray():
    from rigs.nemo_rl.worker import find_nemo_rl

    env = {"MEGAPATCH_DISABLE": "skyrl.*"}
    assert run_ranks(in_nemo_rls_ray, 1, setup=find_nemo_rl, env=env) == [(True, "skyrl.*")]
