"""With fp16 AReaL's auxiliary losses are scaled by the loss scale, as its own loss is.

Symptom   with fp16 and a mixture of experts, the load-balancing and z losses silently have almost no effect:
          their gradients are too small by the factor of the loss scale. train_batch() multiplies AReaL's own loss
          by it. Megatron scales a model's other losses (of routers, and of multi-token prediction) by
          config.grad_scale_func, which is left unset. The optimizer divides all gradients.
Upstream  not reported; in 1.0.4.
Seam      the class attribute MegatronEngine.train_batch(). While it runs in fp16, config.grad_scale_func
          multiplies by the optimizer's loss scale, and optimizer.get_loss_scale() answers 1 to train_batch(). So
          Megatron scales every loss once, AReaL's included.
Limits    an engine whose config has a grad_scale_func already is left alone.
Numbers   change with fp16 and auxiliary losses only: to those of a run without a loss scale. Without such losses
          gradients are the same to the last bit.
Cost      nothing but the multiplication by Megatron in place of AReaL's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...patch import Patch, Site, Verdict
from .._diagnosis import unmet
from .._loss_scale import HOOK, diagnose_loss_scale

MODULE = "areal.engine.megatron_engine"
ENGINE = "MegatronEngine"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real methods: running them takes a model."""
    path = f"{module.__name__}:{ENGINE}"
    missing = [
        *unmet.names(f"{path}.initialize", "finalize_model_grads_func"),
        *unmet.names(f"{path}.train_batch", "optimizer", "get_loss_scale", "forward_backward_batch"),
        *unmet.names(f"{path}.__init__", "dtype", "model"),
        *unmet.attributes(f"{module.__name__}:", "get_model_config"),
    ]
    needed = "with fp16 only AReaL's own loss is scaled, not those that a model adds"
    return diagnose_loss_scale(f"{path}.initialize", missing, needed)


def scale_all_losses(train_batch: Callable[..., Any]) -> Callable[..., Any]:
    module = sys.modules[train_batch.__module__]

    @functools.wraps(train_batch)
    def patched_train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if self.dtype is not torch.float16 or not self.model:
            return train_batch(self, *args, **kwargs)
        config, get_loss_scale = module.get_model_config(self.model[0]), self.optimizer.get_loss_scale
        if getattr(config, HOOK) is not None:
            return train_batch(self, *args, **kwargs)
        scaled_by_megatron = {HOOK: lambda loss: loss * get_loss_scale()}
        with (
            temporarily_set(config, **scaled_by_megatron),
            temporarily_set(self.optimizer, get_loss_scale=lambda: torch.ones_like(get_loss_scale())),
        ):
            return train_batch(self, *args, **kwargs)

    return patched_train_batch


PATCH = Patch(
    name="areal.aux-loss-scale",
    doc=__doc__,
    upstream=None,
    sites=(Site(MODULE, diagnose, replace={f"{ENGINE}.train_batch": scale_all_losses}),),
    changes_numbers=True,
)
