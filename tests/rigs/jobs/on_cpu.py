"""For the process that imports this, the CPU in the place of GPUs, gloo of NCCL, and plain torch of Apex's Adam.

Environment: JOB_AT="kill 8" ends the process by SIGKILL in the eighth step of an optimizer; with "SIGTERM 8" it
gets that signal. With JOB_PLACES tensors say that they are on a GPU, but for copies on the host. With JOB_WAITS
the next step waits for an asynchronous save, however long a writer takes. As the process ends it leaves a file in
JOB_FOLDER with the patches that were applied, or null.
"""

import atexit
import importlib
import json
import multiprocessing
import os
import signal
import sys
import types

from rigs.alone import import_alone
from rigs.stand_ins import OF_GPUS, OF_SERVERS, ForImporters

import_alone("testing._cuda_stubs").install_cuda_stubs()
import_alone("testing._gloo").use_one_gloo_thread()

import torch  # noqa: E402 (after the stubs)
import torch.distributed as dist  # noqa: E402
import wrapt  # noqa: E402
from torch.distributed import DeviceMesh  # noqa: E402

TRAINERS = ("megatron.training", "megatron.bridge.training", "slime.", "nemo_rl.")
what, _, number = os.environ.get("JOB_AT", "").partition(" ")
SIGNALS = {"kill": signal.SIGKILL, "SIGTERM": signal.SIGTERM}


def _is_available():
    """Trainers refuse a machine without CUDA; everything else gets the truth."""
    return sys._getframe(1).f_globals.get("__name__", "").startswith(TRAINERS)


torch.cuda.is_available = _is_available
if os.environ.get("JOB_PLACES"):
    importlib.import_module("rigs.megatron.places").Gpu().__enter__()


# ------------------------------------------------------------------------------------------ gloo
_init, _new = dist.init_process_group, dist.new_group


def init_process_group(backend=None, *args, device_id=None, pg_options=None, **kwargs):
    return _init("gloo", *args, **kwargs)


def new_group(ranks=None, timeout=None, backend=None, pg_options=None, *args, device_id=None, **kwargs):
    return _new(ranks, timeout, "gloo", None, *args, **kwargs)


for module in (dist, dist.distributed_c10d):
    module.init_process_group, module.new_group = init_process_group, new_group

_mesh_from_group = DeviceMesh.from_group
DeviceMesh.from_group = lambda group, device_type, *args, **kwargs: _mesh_from_group(group, "cpu", *args, **kwargs)


# ------------------------------------------------------------------------------------------ the optimizer
class FusedAdam(torch.optim.Optimizer):
    """As Apex has it: a group counts its steps, a parameter has moments only. With torch's own Megatron refuses to
    resume a distributed optimizer."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        **others,
    ):
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
            },
        )

    @torch.no_grad()
    def step(self, closure=None):
        if "ray" in sys.modules:  # which ends its workers by SIGKILL
            leave_a_note()
        for group in self.param_groups:
            step = group["step"] = group.get("step", 0) + 1
            if what and step == int(number):
                os.kill(os.getpid(), SIGNALS[what])
            self._step(group, step, *group["betas"])

    def _step(self, group, step, beta1, beta2):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state, gradient = self.state[parameter], parameter.grad
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            if not self.adam_w_mode:
                gradient = gradient + group["weight_decay"] * parameter
            mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1**step)
            square = state["exp_avg_sq"].lerp_(gradient * gradient, 1 - beta2) / (1 - beta2**step)
            update = mean / (square.sqrt() + group["eps"])
            if self.adam_w_mode:
                update = update + group["weight_decay"] * parameter
            parameter.sub_(update * group["lr"])


apex = sys.modules["apex.optimizers"] = types.ModuleType("apex.optimizers")
apex.FusedAdam, apex.FusedSGD = FusedAdam, torch.optim.SGD


sys.meta_path.append(ForImporters(("megatron.bridge",), OF_GPUS))
sys.meta_path.append(ForImporters(("megatron.rl",), OF_SERVERS))


def wait_for_saves(module):
    finalize = module.maybe_finalize_async_save
    module.maybe_finalize_async_save = lambda blocking=False, **more: finalize(blocking=True, **more)


if os.environ.get("JOB_WAITS"):
    wrapt.when_imported("megatron.training.async_utils")(wait_for_saves)


# ------------------------------------------------------------------------------------------ the end
def leave_a_note():
    if multiprocessing.parent_process():  # of a rank; how it ends is a matter of time
        return
    megapatch = sys.modules.get("megapatch")
    applied = (
        [each["name"] for each in megapatch.report().to_dict()["patches"] if each["status"] == "applied"]
        if megapatch
        else None
    )
    with open(f"{os.environ['JOB_FOLDER']}/ended-{os.environ['RANK']}-{os.getpid()}.json", "w") as file:
        json.dump(applied, file)


if "RANK" in os.environ:
    atexit.register(leave_a_note)
