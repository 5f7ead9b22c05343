"""ROLL's loss is scaled by the loss scale that its optimizer divides gradients by.

Symptom   with fp16 gradients are silently too small by the factor of the loss scale, 2**32 to begin with, and
          most underflow: MegatronTrainStrategy does not pass the optimizer's loss scale to Megatron's schedules
          (config.grad_scale_func), and optimizer.step() unscales all the same. With Adam it looks like ordinary
          training.
Upstream  not reported; in 0.3.0 and on main at 8eb27cc2. SkyRL had the same defect until NovaSky-AI/SkyRL#1212.
          ROLL's own mcore_adapter sets the hook in its trainer for pretraining.
Seam      the class attribute. After MegatronTrainStrategy.initialize() the model config's grad_scale_func is the
          optimizer's scale_loss, if nothing is set yet. Megatron reads it in each step, for the loss and for the
          auxiliary losses of a mixture of experts and of multi-token prediction.
Limits    gradients that are scaled can overflow, which ends ROLL's job without roll.overflow-is-skipped: disable
          both or neither. With several optimizers in one (a mixture of experts) and dynamic scales, Megatron
          scales the loss only by the first one's scale.
Numbers   change with fp16: to those of a run without a loss scale.
Cost      once a model. In a step, one multiplication of the loss, as in Megatron's own training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import Patch, Site, Verdict
from .._diagnosis import unmet
from .._loss_scale import HOOK, diagnose_loss_scale, pass_on_loss_scale

MODULE = "roll.distributed.strategy.megatron_strategy"
STRATEGY = "MegatronTrainStrategy"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real method: running it makes a model."""
    path = f"{module.__name__}:{STRATEGY}.initialize"
    missing = unmet.names(path, "finalize_model_grads_func", "models_wrapped", "optimizer")
    return diagnose_loss_scale(path, missing, f"{STRATEGY} leaves {HOOK} unset")


def set_grad_scale_func(initialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialize)
    def patched_initialize(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = initialize(self, *args, **kwargs)
        for chunk in self.models_wrapped:  # of one config, which they share
            pass_on_loss_scale(chunk.config, self.optimizer)
        return result

    return patched_initialize


PATCH = Patch(
    name="roll.grad-scale",
    doc=__doc__,
    upstream=None,
    sites=(Site(MODULE, diagnose, replace={f"{STRATEGY}.initialize": set_grad_scale_func}),),
    changes_numbers=True,
)
