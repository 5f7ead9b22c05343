"""The factors by which Megatron's schedules multiply a microbatch's loss, seen without running a schedule."""

from __future__ import annotations

import builtins
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from .._diagnosis import StandIn, real_imports_but, with_globals

PACKAGE = "megatron.core.pipeline_parallel"
MODULE = f"{PACKAGE}.schedules"


class OneMicrobatch(NamedTuple):
    """The loss that would be differentiated, and the scale that was set for MoE's own losses."""

    loss: float
    scale: float


def one_microbatch(schedules: ModuleType, num_tokens: int, cp_size: int) -> OneMicrobatch:
    """Return the result of a step's only microbatch, whose loss is 0, on the last pipeline stage.

    The real functions run, with other globals: neither a process group nor a model is needed, and nothing is set.
    """
    scales: list[Any] = []
    data = schedules.torch.zeros(1)
    config = StandIn(calculate_per_token_loss=False, enable_autocast=False, num_moe_experts=2)

    def loss_function(output: Any) -> tuple[Any, Any, dict[str, Any]]:
        return output, schedules.torch.tensor(num_tokens), {}

    stand_ins = {
        "MoEAuxLossAutoScaler": SimpleNamespace(set_loss_scale=scales.append),
        "parallel_state": SimpleNamespace(
            get_context_parallel_world_size=lambda *args, **kwargs: cp_size,
            is_pipeline_last_stage=lambda *args, **kwargs: True,
        ),
        # Some import MTP's scale when they run, which cannot be imported before Megatron itself has been.
        "__builtins__": {**vars(builtins), "__import__": real_imports_but("megatron", StandIn)},
        "get_attr_wrapped_model": lambda *args, **kwargs: lambda *values: None,
        "get_model_type": lambda model: None,
    }
    common = {"model": SimpleNamespace(), "num_microbatches": 1, "forward_data_store": [], "config": config}
    if hasattr(schedules, "forward_step_calc_loss"):
        loss, _ = with_globals(schedules.forward_step_calc_loss, **stand_ins)(
            output_tensor=data,
            loss_func=loss_function,
            vp_stage=None,
            collect_non_loss_data=False,
            cp_group_size=cp_size,
            is_last_stage=True,
            **common,
        )
    else:
        (loss,), _ = with_globals(schedules.forward_step, **stand_ins)(
            forward_step_func=lambda *args: (data, loss_function),
            data_iterator=None,
            input_tensor=[None],
            **common,
        )
    (scale,) = scales
    return OneMicrobatch(loss.item(), scale.item())
