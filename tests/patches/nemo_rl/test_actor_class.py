"""The worker's actor class, in real Ray: what is added and replaced reaches actors and their handles."""

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys

import pytest
from rigs.nemo_rl.steps import SIZE, summary
from rigs.nemo_rl.worker import SHAPES, WORKER, batch, find_nemo_rl, has_own_split_step, nll_loss
from rigs.ray import TESTS, ray_with

from megapatch.testing import run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
    pytest.mark.parametrize("shape", SHAPES),
    pytest.mark.thorough,
]

METHODS = ("begin_train_step", "train_microbatch", "finish_train_step", "abort_train_step")
GUARDED = "prepare_for_lp_inference"
LOAD = """
import json, pickle, sys
import torch
assert "megapatch" not in sys.modules
from rigs.nemo_rl.worker import find_nemo_rl
find_nemo_rl()
cls = pickle.load(sys.stdin.buffer)
worker = object.__new__(cls)
def told(name, *arguments):
    try:
        getattr(worker, name)(*arguments)
    except RuntimeError as error:
        return str(error)
found = {"no step": told("finish_train_step")}
worker._train_step_state = object()
for name in ("prepare_for_lp_inference", "offload_before_refit", "save_checkpoint", "train"):
    found[name] = told(name)
print(json.dumps(found))
"""


@contextlib.contextmanager
def megapatch_comes_last():
    """As if it were imported after the block."""
    import megapatch

    megapatch.restore()
    yield importlib.import_module(WORKER)
    megapatch.apply()


def pickled(rank, world_size):
    """As Ray pickles it: by value. And what handles know, of it and of classes derived from the worker's."""
    import ray
    import torch.distributed.config  # noqa: F401  (it cannot be pickled, and is, with some functions)

    def dumped(actor):
        return ray.cloudpickle.dumps(actor.__ray_metadata__.modified_class)

    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("megapatch").addHandler(handler)
    here = sys.modules[__name__]
    with megapatch_comes_last() as module:
        impl = module.MegatronPolicyWorkerImpl
        here.Derived = ray.remote(num_cpus=0)(type("Derived", (impl,), {}))
        hidden = [ray.remote(type("Hidden", (impl,), {}))]
        try:
            dumped(module.MegatronPolicyWorker)
        except TypeError:  # v0.6.0's own train() is such a function
            del sys.modules["torch.distributed.config"]
    knowing = {}
    for name, actor in {
        "worker": module.MegatronPolicyWorker,
        "derived": here.Derived,
        "hidden": hidden[0],
    }.items():
        meta = actor.__ray_metadata__.method_meta
        parameters = [one.name for one in meta.signatures.get(GUARDED, ())]
        knowing[name] = set(METHODS) <= set(meta.methods), "keep_train_buffers" in parameters
    options = here.Derived._default_options
    return dumped(module.MegatronPolicyWorker), knowing, told, options


def test_an_actor_class_made_before_is_made_again_and_takes_it_all_along(shape):
    env = {"NEMO_RL_SHAPE": shape}
    ((dumped, knowing, told, options),) = run_ranks(pickled, 1, setup=find_nemo_rl, env=env)
    assert knowing["worker"] == knowing["derived"] == (True, True)
    assert options == {"num_cpus": 0}
    assert knowing["hidden"] == ((True, True) if has_own_split_step(shape) else (False, False))
    (warning,) = [one for one in told if "out of its reach" in one]
    assert "Hidden was made a Ray actor before megapatch was imported" in warning

    env["PYTHONPATH"] = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", LOAD], input=dumped, capture_output=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr.decode()
    there = json.loads(done.stdout.splitlines()[-1])
    assert there.pop("no step") == "no train step open; begin_train_step must be called first"
    for name, told in there.items():
        assert told.startswith(f"{name}() would "), "the guard is lost"


def out_of_reach(rank, world_size):
    import megapatch

    importlib.import_module(WORKER)
    patches = [one for one in megapatch.report().to_dict()["patches"] if one["name"].startswith("nemo_rl.")]
    return [text for one in patches for site in one["sites"] for text in site["out_of_reach"]]


def test_wrappers_of_actor_classes_that_were_made_again_are_not_out_of_reach(shape):
    assert run_ranks(out_of_reach, 1, setup=find_nemo_rl, env={"NEMO_RL_SHAPE": shape}) == [[]]


def in_ray(rank, world_size):
    """A step in slices and a whole one, through handles; each in an actor of its own."""
    import ray

    def prepare():
        sys.path.insert(0, TESTS)
        from megapatch.testing import install_cuda_stubs

        install_cuda_stubs()
        from rigs.nemo_rl.worker import find_nemo_rl

        find_nemo_rl()

    here = sys.modules[__name__]
    with megapatch_comes_last() as module:

        class Tiny(module.MegatronPolicyWorkerImpl):
            def __init__(self):
                import torch
                from rigs.nemo_rl.worker import GPT, worker_for

                from megapatch.testing import init_parallel, tiny_gpt, use_one_gloo_thread

                use_one_gloo_thread()
                torch.distributed.init_process_group(
                    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
                )
                init_parallel()
                self.model_and_more = tiny_gpt(**GPT)
                vars(self).update(vars(worker_for(self.model_and_more)))

        here.Tiny = ray.remote(num_cpus=0)(Tiny)
    sys.modules.pop("torch.distributed.config", None)
    with ray_with(prepare):
        whole, split = here.Tiny.remote(), here.Tiny.remote()
        data = batch(0, SIZE, rank=0)
        expected = whole.train.remote(data=data, loss_fn=nll_loss(), gbs=SIZE)
        ray.get(split.begin_train_step.remote(loss_fn=nll_loss(), gbs=SIZE))
        for begin, end in ((0, 2), (2, SIZE)):
            ray.get(split.train_microbatch.remote(data=data.slice(begin, end)))
        got = ray.get(split.finish_train_step.remote())
        return summary(got), summary(ray.get(expected))


def test_a_step_in_slices_in_an_actor(shape):
    ((got, expected),) = run_ranks(in_ray, 1, setup=find_nemo_rl, env={"NEMO_RL_SHAPE": shape})
    assert got == pytest.approx(expected, rel=1e-5)
