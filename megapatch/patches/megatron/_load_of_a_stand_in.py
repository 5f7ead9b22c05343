"""Load weights into a stand-in through the real methods of Megatron's modules, and step a stand-in's optimizer."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from ..._mcore.main_params import GROUPS
from ...patch import unpatched
from .._diagnosis import StandIn, answering_none

MODULES = "megatron.core.transformer.module"


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
