"""slime's train.py, of the checkout that SLIME_CHECKOUT names, in a local Ray that takes CPUs for GPUs."""

import os
import runpy
import sys
from pathlib import Path

from rigs.jobs.local_ray import local_ray

if __name__ == "__main__":
    checkout = os.environ["SLIME_CHECKOUT"]
    sys.argv[0] = f"{checkout}/train.py"
    sys.path.insert(0, checkout)
    Path(
        os.environ["JOB_FOLDER"], "torch_memory_saver_hook_mode_preload.abi3.so"
    ).touch()  # what --offload-train loads
    with local_ray():
        runpy.run_path(sys.argv[0], run_name="__main__")
