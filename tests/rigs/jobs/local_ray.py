"""A Ray of a job's own, which takes CPUs for GPUs; its workers' logs come into the job's folder."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import ray


@contextmanager
def local_ray(start=True, num_cpus=5):
    """Start a Ray, or leave that to the body, which gets the options."""
    with TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as sockets:  # of a short path
        options = {
            "num_gpus": 3,
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "object_store_memory": 200 * 2**20,
            "log_to_driver": False,  # the last lines might not come
            "_temp_dir": sockets,
        }
        if start:
            ray.init(**options)
        try:
            yield options
        finally:
            ray.shutdown()
            logs = Path(os.environ["JOB_FOLDER"], "logs")
            for log in Path(sockets, "session_latest", "logs").glob("worker-*.???"):
                logs.mkdir(exist_ok=True)
                shutil.copy(log, logs / f"{log.name}.log")
