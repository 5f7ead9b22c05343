"""The real HybridDeviceOptimizer; without GPUs, on tensors that say where they are."""

import contextlib
import importlib
from unittest import mock

import torch

from megapatch.testing import tiny_gpt
from rigs.megatron.options import ADAM
from rigs.megatron.places import Gpu

PLAIN = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": False}
OFFLOADS = {
    "all": {**PLAIN, "optimizer_offload_fraction": 1.0},
    "half": {**PLAIN, "optimizer_offload_fraction": 0.5},
    "none": {**PLAIN, "optimizer_offload_fraction": 0.0},
    "overlapped": {**PLAIN, "optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": True},
    "precision-aware": {**PLAIN, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True},
}


class HostAdam(torch.optim.AdamW):
    """The optimizer of parameters on the host."""


@contextlib.contextmanager
def offloading(options):
    """Let optimizers be built, stepped, saved and loaded with these options; with none, do nothing."""
    if not options:
        yield
        return
    config = importlib.import_module("megatron.core.optimizer.optimizer_config")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    # 0.13 to 0.16 ask for Transformer Engine as soon as the precision-aware optimizer is configured, and all take
    # a HybridDeviceOptimizer's state apart only where there is one.
    there = mock.patch.object(config, "is_te_min_version", return_value=True, create=True)
    # Megatron places loaded state by the class of the optimizer, which with Transformer Engine is another on GPUs.
    on_host = mock.patch.object(importlib.import_module("megatron.core.optimizer"), "CPUAdam", HostAdam)
    on_gpu = contextlib.nullcontext() if torch.ones(1).cuda().is_cuda else Gpu()
    with there, mock.patch.object(distributed, "HAVE_APEX_OR_TE", True), on_host, on_gpu:
        yield


def offloading_gpt(options, lr=0.1, **more):
    """Build a model in bf16 whose optimizer has these options."""
    optim = {**ADAM["optim"], **options}
    return tiny_gpt(dtype="bf16", **{**ADAM, "optim": optim, "lr": lr, **more})
