"""A made-up HybridDeviceOptimizer: one parameter in fp32, of which it steps a copy on the CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .._diagnosis import answering_none


def hybrid_with_copy(module: ModuleType, parameter: Any, held: Any, **more: Any) -> Any:
    """Return the optimizer, of the module's own class.

    Args:
        module: megatron.core.optimizer.distrib_optimizer.
        parameter: the model's.
        held: the copy.
        more: further attributes.
    """
    hybrid = object.__new__(answering_none(module.HybridDeviceOptimizer))
    vars(hybrid).update(
        param_to_inner_param={parameter: held},
        inner_param_to_orig_param={held: parameter},
        gpu_params_map_cpu_copy={parameter: held},
        cpu_copys_map_gpu_param={held: parameter},
        param_to_fp32_param={},
        param_groups=[{"params": [parameter]}],
        param_update_in_fp32=True,
        **more,
    )
    return hybrid
