"""The scale functions of a model's config during one call of a step: they weigh its losses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .._dotted import find
from ._normalization import Normalization


class LossScaling:
    """Megatron's own scale functions, times the weights of a call.

    Attributes:
        losses: number of losses scaled so far, without those of the model's own.
    """

    def __init__(self, normalization: Normalization, num_microbatches: int, factor: float) -> None:
        self.losses = 0
        self._normalization = normalization
        self._loss, self._others = (weight * factor for weight in normalization.weights(num_microbatches))

    def functions(self, config: Any) -> dict[str, Any]:
        """Return the replacements of a config's scale functions, by the names of its attributes."""
        found: dict[str, Any] = {"grad_scale_func": self._weighing(config.grad_scale_func)}
        for name, scale in vars(config).items():  # moe_grad_scale_func and others, from 0.19 on
            if name.endswith("_grad_scale_func") and scale is not None:
                found[name] = _times(scale, self._others)
        return found

    def _weighing(self, scale: Callable[..., Any] | None) -> Callable[..., Any]:
        def scaled(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            # For losses of the model's own (a router's, multi-token prediction's, from 0.19 on that of sparse
            # attention's indexer) Megatron asks with a constant.
            is_loss = tensor.requires_grad
            self.losses += is_loss
            if not is_loss:
                self._normalization.check_other_losses("a loss of the model's own, which its schedule scales,")
            result = tensor if scale is None else scale(tensor, *args, **kwargs)
            weight = self._loss if is_loss else self._others
            result = result if weight == 1.0 else result * weight
            return result if is_loss else _shaped_as_held(result)

        return scaled


def _shaped_as_held(scale: Any) -> Any:
    """Reshape a router's scale of one element to the shape of the one that Megatron copies it into.

    A scale function of the caller may have left one without dimensions (NeMo-RL's train() does), and Megatron's
    own, of shape [1], cannot be copied into that. Megatron keeps the first scale and copies later ones into it
    (MoEAuxLossAutoScaler.set_loss_scale in transformer/moe/moe_utils.py, as in 0.16.1 and 0.19.2).
    """
    routers = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    held = find(routers, "MoEAuxLossAutoScaler.main_loss_backward_scale")
    return scale if held is None else scale.reshape(held.shape)


def _times(scale: Callable[[], Any], weight: float) -> Callable[[], Any]:
    return lambda: scale() * weight
