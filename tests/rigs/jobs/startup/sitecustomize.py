"""First on PYTHONPATH of a job's processes: before they import Megatron or a framework, the CPU takes the place of
GPUs."""

import importlib
import os
import sys

TESTS = os.path.abspath(os.path.join(__file__, *[os.pardir] * 4))
STAND_INS = {
    "megatron": "on_cpu",
    **dict.fromkeys(("nemo_rl", "skyrl_train", "slime", "verl"), "frameworks"),
}


class BeforeMegatron:
    """A finder for sys.meta_path that finds nothing; torchrun's agent and other helpers never import Megatron."""

    def find_spec(self, name, path=None, target=None):
        stand_ins = STAND_INS.pop(name.partition(".")[0], None)
        if stand_ins:
            sys.path.append(TESTS)
            importlib.import_module(f"rigs.jobs.{stand_ins}")


sys.meta_path.insert(0, BeforeMegatron())
