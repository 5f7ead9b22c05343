"""Weights that are loaded without optimizer state reach the copies from which an offloaded optimizer steps.

Symptom   with optimizer_cpu_offload, the first step after weights were loaded without optimizer state puts the
          weights from before back into the model, silently: with a fresh model, random ones. With
          use_precision_aware_optimizer that concerns parameters in fp32 only; in 0.12 all of them.
Upstream  NVIDIA/Megatron-LM#5071 (open); in 0.12 to 0.19 and on main. NeMo-RL#2372 and Megatron-Bridge#4082 are
          workarounds. reload_model_params() of the distributed optimizer updates nothing in 0.12, and from 0.13 on
          only the fp32 copies of parameters in lower precision: neither the main parameters, which are in fp32
          already, nor the copies of these.
Seam      the class attribute DistributedOptimizer._copy_model_params_to_main_params, which reload_model_params()
          calls. The original runs as for any other optimizer, and updates the main parameters; from these, each of
          the HybridDeviceOptimizer's own copies is updated.
Limits    the caller has to call optimizer.reload_model_params() after loading, as without offloading.
          Adam's state does not change. Without the distributed optimizer nothing is repaired: with
          Float16OptimizerWithFloat16Params the first step ends with a KeyError (#4046).
          CI has parameters that say they are on a GPU; it was tried on a GPU with 0.16.1.
Numbers   change after a load that left the copies as they were: to those of a run whose optimizer is not
          offloaded.
Cost      one copy of each parameter for each call of reload_model_params(); nothing in a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, Patch, Site, Verdict, unpatched
from .._diagnosis import StandIn, answering_none, expect_none, running, unmet
from ._stand_ins import hybrid_with_copy

MODULE = "megatron.core.optimizer.distrib_optimizer"
HYBRID = "HybridDeviceOptimizer"
INNER = "param_to_inner_param"
"""The parameters that a HybridDeviceOptimizer steps, by its own: the same, or a copy on the CPU or in fp32."""
FSDP = ("use_megatron_fsdp", "use_custom_fsdp")


def diagnose(module: ModuleType) -> Verdict:
    """Let the real method reload one parameter in fp32, of which a made-up optimizer has a copy on the CPU."""
    copy = f"{MODULE}:DistributedOptimizer._copy_model_params_to_main_params"
    expect_none(
        *unmet.names(copy, HYBRID),
        *unmet.names(f"{MODULE}:{HYBRID}._init_sub_optimizers", INNER),
        *unmet.attributes(f"{MODULE}:", "torch"),
    )
    parameter, held = module.torch.ones(1), module.torch.zeros(1)
    optimizer = object.__new__(answering_none(module.DistributedOptimizer))
    vars(optimizer).update(
        optimizer=hybrid_with_copy(module, parameter, held, state={}),
        ddp_config=StandIn(**dict.fromkeys(FSDP, False)),
        config=StandIn(use_precision_aware_optimizer=True, use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
    )
    with running("_copy_model_params_to_main_params()"):
        unpatched(module.DistributedOptimizer._copy_model_params_to_main_params)(optimizer)
    if held.item() == 1:
        return Verdict(FIXED, "copies on the CPU are updated")
    return Verdict(NEEDED, "copies on the CPU keep the weights from before they were reloaded")


def reload_copies(copy_params: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(copy_params)
    def patched_copy_model_params_to_main_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        hybrid = self.optimizer
        copies = getattr(hybrid, INNER, None)
        if copies is None:
            return copy_params(self, *args, **kwargs)
        if any(getattr(self.ddp_config, name, False) for name in FSDP):
            result = copy_params(self, *args, **kwargs)  # it has no main parameters to update
        else:
            # Where it sees a HybridDeviceOptimizer it returns before it has updated any main parameter.
            with temporarily_set(self, optimizer=None):
                result = copy_params(self, *args, **kwargs)
        for parameter, held in copies.items():
            if held is not parameter:
                held.data.copy_(parameter.data)
        return result

    return patched_copy_model_params_to_main_params


PATCH = Patch(
    name="megatron.reload-offloaded-params",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/5071",
    changes_numbers=True,
    sites=(
        Site(MODULE, diagnose, replace={"DistributedOptimizer._copy_model_params_to_main_params": reload_copies}),
    ),
)
