"""Runs a program that uses SkyRL and Ray, with SkyRL's stand-ins in this process and in Ray's workers.

python -m rigs.skyrl.ray PROGRAM, in the folder of the tests, with the release in SKYRL_RELEASE.
"""

import importlib
import logging
import os
import runpy
import sys
from functools import partial

from megapatch.testing import install_cuda_stubs
from rigs.ray import SETTINGS, TESTS
from rigs.skyrl.releases import find_skyrl


def set_up():
    """Make SkyRL importable next to the real Ray, and have its loggers write nothing."""
    find_skyrl(real=["ray"])
    importlib.import_module("rich.logging").RichHandler = lambda **options: logging.NullHandler()
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as moved

    # where SkyRL finds it in the Ray that it pins (ray.util has a function of the module's name)
    sys.modules["ray.util.placement_group"].PlacementGroupSchedulingStrategy = moved


def set_up_worker():
    install_cuda_stubs()
    set_up()
    importlib.import_module("megatron.bridge.peft.utils").finalize_model_grads_with_expert_adapter_sync = finalize


def finalize(*args):
    """Reduce gradients as Megatron does; Bridge's function also does so for experts' LoRA adapters."""
    importlib.import_module("megatron.core.distributed").finalize_model_grads(*args)


def init(real, runtime_env):
    assert runtime_env == {"worker_process_setup_hook": "megapatch.testing.install_cuda_stubs"}
    hook = {"worker_process_setup_hook": "rigs.skyrl.ray.set_up_worker"}
    return real(address="local", log_to_driver=False, runtime_env=hook, **SETTINGS)


if __name__ == "__main__":
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    folder = os.path.dirname(os.path.abspath(sys.argv[1]))  # which Python puts first on the path of a program
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, folder, os.environ.get("PYTHONPATH", "")])
    ray.init = partial(init, ray.init)
    set_up()
    runpy.run_path(sys.argv[1], run_name="__main__")
