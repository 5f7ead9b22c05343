"""Made-up objects of Megatron's classes, and what diagnoses have the real methods do with them.

A step of a bucket group with two parameters; a load of weights, and an optimizer's step after it; and a
HybridDeviceOptimizer, which steps a copy on the CPU of one parameter in fp32.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from ..._mcore.main_params import GROUPS
from ...patch import unpatched
from .._diagnosis import ASSERTIONS, StandIn, answering_none

FINISH = "finish_grad_sync()"
MODULES = "megatron.core.transformer.module"


def events_of_step(group: Any, passes: int, learned: int, unused: bool = False) -> list[str]:
    """Return when a stand-in reduces in a step, in words; and the error that ends it.

    Args:
        group: the class of bucket groups.
        passes: backward passes of the step.
        learned: passes of the steps that the stand-in has learned from; 0: it has learned nothing yet. Up to 0.15
            Megatron does not learn.
        unused: a second parameter gets no gradient in this step.
    """
    seen: list[str] = []
    place = ""

    def start_grad_sync(**ignored: Any) -> None:
        seen.append(place)
        stand_in.grad_reduce_handle = SimpleNamespace(wait=lambda: None)

    params = ["weight", "unused"] if unused else ["weight"]
    stand_in = StandIn(
        ddp_config=StandIn(overlap_grad_reduce=True, num_distributed_optimizer_instances=1),
        buckets=[],
        params_with_grad=set(),
        per_param_grad_ready_counts={},
        _copy_back_extra_main_grads=lambda: None,
        params=set(params),
        param_to_bucket=dict.fromkeys(params),
        golden_per_param_grad_ready_counts=dict.fromkeys(params, learned) if learned else {},
        is_last_microbatch=True,
        is_first_batch=not learned,
        grad_reduce_handle=None,
        grad_reduce_finished=False,
        start_grad_sync=start_grad_sync,
    )
    try:
        for number in range(passes):
            place = f"pass {number + 1}"
            unpatched(group.register_grad_ready)(stand_in, "weight")
        place = FINISH
        unpatched(group.finish_grad_sync)(stand_in)
        unpatched(group.reset)(stand_in)
        if stand_in.per_param_grad_ready_counts or stand_in.params_with_grad:
            seen.append("the step after it")  # for which nothing of this one may be left
    except ASSERTIONS as error:
        seen.append(type(error).__name__)
    return seen


def load_one(kind: Any, parameter: Any) -> None:
    """Load 1 into a module of this class that has one parameter."""
    torch = sys.modules["torch"]
    model = object.__new__(kind)  # without its configuration
    torch.nn.Module.__init__(model)
    model.weight = parameter
    model.__class__ = answering_none(kind)  # not before: torch asks whether there is a weight already
    unpatched(kind.load_state_dict)(model, {"weight": torch.ones(1)})


def steps_around_a_load(optimizers: ModuleType) -> tuple[float, float]:
    """Return a bf16 parameter, whose main parameter is 2, after a step, and after a load of 1 and another step."""
    torch = sys.modules["torch"]
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = object.__new__(answering_none(optimizers.Float16OptimizerWithFloat16Params))
    vars(optimizer).update(
        optimizer=StandIn(step=lambda: None),
        config=StandIn(),
        **dict(zip(GROUPS, ([[parameter]], [[torch.full((1,), 2.0)]]), strict=True)),
    )
    step = functools.partial(unpatched(optimizers.MixedPrecisionOptimizer.step_with_ready_grads), optimizer)
    step()
    stepped = parameter.item()
    load_one(sys.modules[MODULES].MegatronModule, parameter)
    step()
    return stepped, parameter.item()


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
