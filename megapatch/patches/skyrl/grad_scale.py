"""SkyRL's loss is scaled by the loss scale that its optimizer divides gradients by.

Symptom   gradients are silently too small by the factor of the loss scale: MegatronModelWrapper does not pass the
          optimizer's loss scale to Megatron's schedules (config.grad_scale_func), and optimizer.step() unscales
          all the same. It happens with trainer.policy.megatron_config.optimizer_config_kwargs.loss_scale, or fp16
          there. With Adam it looks like ordinary training.
Upstream  fixed by NovaSky-AI/SkyRL#1212, in all releases of skyrl; skyrl-train 0.2.0 to 0.3.1 and checkouts up to
          2026-03-01 have the defect.
Seam      the class attribute. After MegatronModelWrapper.__init__ the model config's grad_scale_func is the
          optimizer's scale_loss, if there is an optimizer and nothing is set yet. Megatron reads it in each step,
          for the loss and for the auxiliary loss of a mixture of experts.
Limits    with several optimizers in one (a mixture of experts) and dynamic scales, Megatron scales the loss only
          by the first one's scale. SkyRL steps the learning rate after a step that was skipped for an overflow.
Numbers   change where the loss scale is not 1: to those of a run without a loss scale.
Cost      once a model. In a step, one multiplication of the loss, as upstream.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import Patch, Site, Verdict
from .._diagnosis import unmet
from .._loss_scale import HOOK, diagnose_loss_scale, pass_on_loss_scale

MODULES = (
    "skyrl_train.workers.megatron.megatron_model_wrapper",
    "skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper",
)
WRAPPER = "MegatronModelWrapper"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real constructor: running it needs a model."""
    init = f"{module.__name__}:{WRAPPER}.__init__"
    missing = [
        *unmet.parameters(init, "actor_module", "actor_optimizer"),
        *unmet.names(init, "get_model_config", "finalize_model_grads_func"),
        *unmet.attributes(f"{module.__name__}:", "get_model_config"),
    ]
    return diagnose_loss_scale(init, missing, f"{WRAPPER} leaves {HOOK} unset")


def set_grad_scale_func(init: Callable[..., None]) -> Callable[..., None]:
    module = sys.modules[init.__module__]

    @functools.wraps(init)
    def patched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        pass_on_loss_scale(module.get_model_config(self.actor_module[0]), self.actor_optimizer)

    return patched_init


PATCH = Patch(
    name="skyrl.grad-scale",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1212",
    sites=tuple(
        Site(module, diagnose, replace={f"{WRAPPER}.__init__": set_grad_scale_func}) for module in MODULES
    ),
    changes_numbers=True,
)
