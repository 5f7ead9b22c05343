"""First on PYTHONPATH of a job's processes: before they import Megatron, the CPU takes the place of GPUs."""

import importlib
import os
import sys

TESTS = os.path.abspath(os.path.join(__file__, *[os.pardir] * 4))


class BeforeMegatron:
    """A finder for sys.meta_path that finds nothing; torchrun's agent and other helpers never import Megatron."""

    asked = False

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "megatron" and not self.asked:
            self.asked = True
            sys.path.append(TESTS)
            importlib.import_module("rigs.jobs.on_cpu")


sys.meta_path.insert(0, BeforeMegatron())
