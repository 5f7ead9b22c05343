"""The factors by which Megatron multiplies a microbatch's losses, seen without running a schedule or a model."""

from __future__ import annotations

import builtins
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from .._diagnosis import StandIn, real_imports_but, torch_stand_in, with_globals

PACKAGE = "megatron.core.pipeline_parallel"
MODULE = f"{PACKAGE}.schedules"
PARALLEL = "megatron.core.parallel_state"
ROUTER = "megatron.core.transformer.moe.router"
ROUTERS = "megatron.core.transformer.moe.moe_utils"
SCALE = "main_loss_backward_scale"


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


def weight_per_token(apply_z_loss: Any, torch: ModuleType) -> float:
    """Return by how much a router multiplies its z-loss with calculate_per_token_loss, for each of its tokens.

    The real function runs as one of two ranks that share the tokens of a sequence.
    """
    attached: list[float] = []

    def attach(logits: Any, loss: float) -> Any:
        attached.append(loss)
        return logits

    stand_ins = {
        "torch": torch_stand_in(is_grad_enabled=lambda: True),
        "z_loss_func": lambda *args, **kwargs: 1.0,
        "save_to_aux_losses_tracker": lambda *args, **kwargs: None,
        "parallel_state": SimpleNamespace(get_tensor_and_context_parallel_world_size=lambda: 2),
        "MoEAuxLossAutoScaler": SimpleNamespace(apply=attach),
    }
    router = StandIn(
        config=StandIn(moe_z_loss_coeff=1.0, num_layers=1),
        training=True,
        calculate_per_token_loss=True,
        tp_cp_group=StandIn(size=lambda: 2),
    )
    with_globals(apply_z_loss, **stand_ins)(router, torch.zeros(4, 2))
    (loss,) = attached
    return loss / 4
