"""Metrics of a step, whose denominators are known only at its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import MisuseError

KINDS = ("tokens", "sequences", "loss", "none")
"""The divisor of a metric; "loss" stands for that of the loss."""

NLL: Mapping[str, str] = MappingProxyType(
    {"loss": "tokens", "num_unmasked_tokens": "none", "num_valid_samples": "none"}
)
"""Kinds for the metrics of a negative log-likelihood loss."""

POLICY_GRADIENT: Mapping[str, str] = MappingProxyType(
    {
        "loss": "loss",
        "kl_penalty": "loss",
        **dict.fromkeys(
            (
                "approx_entropy",
                "gen_kl_error",
                "is_oob_ratio",
                "js_divergence_error",
                "policy_kl_error",
                "probs_ratio",
                "probs_ratio_clamped",
                "sampling_importance_ratio",
                "token_mult_prob_error",
            ),
            "tokens",
        ),
        "num_valid_samples": "none",
        "positive_nll_loss": "none",
    }
)
"""Kinds for the metrics of the usual (clipped) policy-gradient losses, by the names that NeMo-RL gives them.

If importance ratios are per sequence, sampling_importance_ratio is of the kind "sequences"; if the mask is per
sequence, so is is_oob_ratio: ``{**POLICY_GRADIENT, "is_oob_ratio": "sequences"}``."""


def normalize_metrics(
    metrics: Mapping[str, Any],
    *,
    tokens: float,
    sequences: float,
    loss: str = "tokens",
    kinds: Mapping[str, str] = POLICY_GRADIENT,
) -> dict[str, Any]:
    """Divide each metric, which is a sum, to make it a mean over tokens or sequences.

    Args:
        metrics: sums by name: numbers or tensors of any shape. It is not changed.
        tokens: of the whole step, over all data-parallel ranks.
        sequences: of the whole step, over all data-parallel ranks.
        loss: "tokens" or "sequences", whichever the loss is divided by.
        kinds: by name, one of "tokens", "sequences", "loss" (divided as the loss is) and "none" (left as it is).
            Names that it lacks are of the kind "loss". Names with ``_min`` or ``_max`` in them are always left as
            they are.

    Returns:
        The means, in a new dictionary.

    Raises:
        MisuseError: for an unknown kind or a zero denominator.
    """
    divisors: dict[str, float | None] = {"tokens": tokens, "sequences": sequences, "none": None}
    if loss not in ("tokens", "sequences"):
        raise MisuseError(f'loss is "{loss}"; expected "tokens" or "sequences"')
    divisors["loss"] = divisors[loss]
    normalized = {}
    for name, value in metrics.items():
        extreme = "_min" in name or "_max" in name
        kind = "none" if extreme else kinds.get(name, "loss")
        if kind not in divisors:
            raise MisuseError(f'the kind of {name} is "{kind}"; expected one of {", ".join(KINDS)}')
        divisor = divisors[kind]
        if divisor is not None and not divisor > 0:
            denominator = loss if kind == "loss" else kind
            raise MisuseError(f"{name} cannot be divided by {divisor:g} {denominator}")
        normalized[name] = value if divisor is None else value / divisor
    return normalized
