"""Optimizers whose state is on the CPU: a load has to reach the copies from which they step.

The real classes, around one parameter that says it is on a GPU.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

from ..check import DP, Check, Layout, expect, the_defect

DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
WITHOUT_FSDP = SimpleNamespace(use_megatron_fsdp=False, use_custom_fsdp=False)  # new name, old name


def reload_of_an_offloaded_parameter(layout: Layout = DP) -> None:
    """Load weights without optimizer state."""
    import torch

    module = import_module(DISTRIBUTED)
    parameter, held = torch.ones(1), torch.zeros(1)
    optimizer = SimpleNamespace(
        optimizer=SimpleNamespace(param_to_inner_param={parameter: held}),
        ddp_config=WITHOUT_FSDP,
        config=SimpleNamespace(
            use_precision_aware_optimizer=True, use_precision_aware_optimizer_no_fp8_or_ds_fp8=True
        ),
    )
    module.DistributedOptimizer._copy_model_params_to_main_params(optimizer)
    expect(torch.equal(held, parameter), "the next step puts back the weights from before the load")


def loaded_state_of_an_offloaded_parameter(layout: Layout = DP) -> None:
    """Load optimizer state."""
    import torch

    module = import_module(DISTRIBUTED)
    parameter, held = torch.ones(1), torch.zeros(1)
    hybrid = object.__new__(module.HybridDeviceOptimizer)
    vars(hybrid).update(
        param_to_inner_param={parameter: held},
        inner_param_to_orig_param={held: parameter},
        param_to_fp32_param={},
        param_update_in_fp32=True,
        defaults={"cpu_optimizer_cls": SimpleNamespace},
        state={parameter: {"master_param": torch.zeros(1), "step": torch.ones(())}},
        cpu_optimizers=[SimpleNamespace(param_groups=[{"params": [held]}], state={})],
        gpu_optimizer=None,
    )
    with the_defect(KeyError):
        hybrid._sync_hdo_state_to_sub_optimizers()
    expect(torch.equal(held, parameter), "the optimizer steps from a copy that the load has not reached")
    expect(hybrid.state[parameter]["master_param"] is held, "the optimizer has another main parameter")
    optimizer = SimpleNamespace(
        optimizer=hybrid,
        ddp_config=WITHOUT_FSDP,
        model_param_group_index_map={"name": (0, 0)},
        config=SimpleNamespace(
            use_precision_aware_optimizer=False, use_precision_aware_optimizer_no_fp8_or_ds_fp8=False
        ),
    )
    hybrid.param_groups = [{"params": [parameter]}]
    with the_defect(KeyError):
        module.DistributedOptimizer._set_main_param_and_optimizer_states(
            optimizer, "name", tensors={"param": torch.full((1,), 2.0)}
        )
    expect(parameter.item() == held.item() == 2.0, "the load has not reached the copy")


CHECKS = (
    Check("megatron.reload-offloaded-params", reload_of_an_offloaded_parameter),
    Check("megatron.load-offloaded-state", loaded_state_of_an_offloaded_parameter),
)
