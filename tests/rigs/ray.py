"""A local Ray, and hooks that its workers find by name."""

import contextlib
import gc
import os
import sys
import warnings
from pathlib import Path

TESTS = str(Path(__file__).parent.parent)
SETTINGS = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20}


@contextlib.contextmanager
def ray_with(hook=None, **settings):
    """Start a Ray whose workers run this hook."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    env = {"worker_process_setup_hook": hook} if hook else None
    ray.init(address="local", log_to_driver=False, runtime_env=env, **{**SETTINGS, **settings})
    try:
        yield ray
    finally:
        with _unwaited_processes():
            ray.shutdown()


@contextlib.contextmanager
def cluster():
    """Start a Ray to which a driver can connect as several jobs, each in less than a second rather than eight."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    there = Cluster(initialize_head=True, head_node_args=SETTINGS)
    os.environ["RAY_ADDRESS"] = there.address
    try:
        yield
    finally:
        with _unwaited_processes():
            there.shutdown()
            del there


@contextlib.contextmanager
def _unwaited_processes():
    """Ray kills its processes without waiting for them; Popen warns of that when it is dropped or collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@contextlib.contextmanager
def job(how=None, **options):
    """Connect as a job, by `ray.init(**options)` or by calling `how`."""
    import ray

    (how or ray.init)(**options)
    try:
        yield
    finally:
        ray.shutdown()


def note_order():
    """Record in the environment whether megapatch was imported before this hook."""
    os.environ["HOOK_FOUND"] = "megapatch" if "megapatch" in sys.modules else "nothing"


def remotes(known):
    """Return a task and an actor class, which call a function that they are given, or `known`; and `status`.

    All of them are defined here and not at module level, so that workers get them by value.
    """
    import ray

    @ray.remote(num_cpus=0)
    def task(function=known, *args):
        return function(*args)

    @ray.remote(num_cpus=0)
    class Actor:
        def call(self, function=known, *args):
            return function(*args)

    def status(*names):
        """Of the sites whose modules are here."""
        import megapatch

        patches = megapatch.report().to_dict()["patches"]
        sites = {one["name"]: one["sites"] for one in patches}
        return [one["status"] for name in names for one in sites[name] if one["module"] in sys.modules]

    return task, Actor, status
