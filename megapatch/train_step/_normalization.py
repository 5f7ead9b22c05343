"""The divisors of a step's gradient on Megatron's DistributedDataParallel, in its calls and at its end.

The schedule divides losses by the microbatches of its own call. Each call's losses are multiplied by them again
and divided by a number that is the same for all calls of the step (`weights`). The divisor that is left for
the whole gradient is known when the last call begins (`total`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from .._python.dotted import find
from ..errors import MisuseError


def check_normalizer(normalizer: float, unit: str) -> None:
    """Raise MisuseError unless the normalizer is above 0 and finite; all ranks have the same."""
    if not 0 < normalizer < math.inf:
        raise MisuseError(f"the sum of {unit} over all ranks is {normalizer:g}; expected a finite number above 0")


class Normalization:
    """The microbatches and counts of an open step, and the factors of its losses that follow."""

    def __init__(
        self,
        expected_count: float | None,
        expected_microbatches: int | None,
        calls_add_up: bool,
        config: Any,
        parallel: Any,
    ) -> None:
        self.expected_count, self.expected_microbatches = expected_count, expected_microbatches
        self.calls_add_up = calls_add_up
        self.per_token = bool(config.calculate_per_token_loss)
        self.parallel = parallel
        if any(getattr(config, name, None) for name in ("num_moe_experts", "mtp_num_layers")):
            self.check_other_losses("a mixture of experts or multi-token prediction")

    def check_other_losses(self, source: str) -> None:
        """Raise if there is nothing to weigh losses of the model's own by."""
        # With per_token Megatron multiplies them by tokens, as the loss.
        if self.expected_count is not None and self.expected_microbatches is None and not self.per_token:
            raise MisuseError(
                f"expected_count with {source} needs expected_microbatches, about how many microbatches a rank "
                "has in a step: it weighs their losses"
            )

    @property
    def by_tokens(self) -> bool:
        """Whether Megatron's finalize gets the tokens that the schedules have counted."""
        return self.expected_count is None and not self.calls_add_up

    def forget(self) -> None:
        self.microbatches = 0
        self.count = 0.0
        self.divisor = 0  # of means, while the step is open

    def add(self, num_microbatches: int, count: float | None) -> None:
        """Add a call, before it is made."""
        self.divisor = self.divisor or self.expected_microbatches or num_microbatches
        self.microbatches += num_microbatches
        self.count += count or 0.0

    def weights(self, num_microbatches: int) -> tuple[float, float]:
        """Return the factors of a call: of the loss, and of a router's or multi-token prediction's losses."""
        if self.expected_count is None:
            if self.per_token:
                return 1.0, 1.0  # the schedule does not divide
            if self.calls_add_up:
                return 1.0, num_microbatches / (self.expected_microbatches or num_microbatches)
            weight = num_microbatches / self.divisor
            return weight, weight
        if self.per_token:
            # The schedule still divides a loss returned as (sum, metrics) by the call's microbatches, times
            # context parallel; it does not divide a router's loss, but multiplies it by the tokens.
            loss = num_microbatches / (self.parallel.get_context_parallel_world_size() * self.expected_count)
            others = 1.0 / self.expected_count
        else:
            loss = num_microbatches / self.expected_count
            others = num_microbatches / (self.expected_microbatches or 1) / self._data_parallel_size()
        return 1.0 if self.calls_add_up else loss, others

    def total(self, device: Any) -> tuple[float, float | None]:
        """Return the factor that is left for the gradient of the whole step, and the step's whole divisor.

        The latter is None if Megatron's finalize divides, by tokens. With a count this is a collective.
        """
        if self.expected_count is not None:
            normalizer = self._total_count(device)
            check_normalizer(normalizer, "counts")
            factor = self.expected_count / normalizer
            if not self.per_token and not self.calls_add_up:  # Megatron averages over ranks
                factor *= self._data_parallel_size()
            return factor, normalizer
        if self.calls_add_up:
            return 1.0, 1.0
        if self.per_token:
            return 1.0, None
        return self.divisor / self.microbatches, float(self.microbatches)

    def _total_count(self, device: Any) -> float:
        """Sum the counts over data parallel. Context parallel is left out: its ranks share samples."""
        import torch

        count = torch.tensor([self.count], dtype=torch.float64, device=device)
        torch.distributed.all_reduce(count, group=self.parallel.get_data_parallel_group())
        return float(count)

    def _data_parallel_size(self) -> int:
        return int(self.parallel.get_data_parallel_world_size())


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
