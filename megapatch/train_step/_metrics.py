"""Metrics of a step whose denominators are known at its end only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import MisuseError

KINDS = ("tokens", "sequences", "loss", "none")
"""What a metric is divided by. "loss": by what the loss is divided by."""

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
"""Kinds for the metrics of the usual (clipped) policy-gradient losses, by the names that NeMo-RL gives them. With
importance ratios of whole sequences, sampling_importance_ratio is of the kind "sequences"; with a mask of whole
sequences, so is is_oob_ratio: ``{**POLICY_GRADIENT, "is_oob_ratio": "sequences"}``."""


def normalize_metrics(
    metrics: Mapping[str, Any],
    *,
    tokens: float,
    sequences: float,
    loss: str = "tokens",
    kinds: Mapping[str, str] = POLICY_GRADIENT,
) -> dict[str, Any]:
    """Divide each metric, which is a sum, by what it is the mean of; a new dictionary.

    tokens, sequences   of the whole step, over all data-parallel ranks
    loss    "tokens" or "sequences": what the loss is divided by
    kinds   by name, one of `KINDS`. Names with ``_min`` or ``_max`` in them stay as they are, whatever it says;
            names that are not here are of the loss's kind.

    Raises MisuseError for a kind that there is not, and when something is to be divided by zero.
    """
    divisors: dict[str, float | None] = {"tokens": tokens, "sequences": sequences, "none": None}
    if loss not in ("tokens", "sequences"):
        raise MisuseError(f"loss is {loss!r}; expected 'tokens' or 'sequences'")
    divisors["loss"] = divisors[loss]
    normalized = {}
    for name, value in metrics.items():
        extreme = "_min" in name or "_max" in name
        kind = "none" if extreme else kinds.get(name, "loss")
        if kind not in divisors:
            raise MisuseError(f"the kind of {name} is {kind!r}; expected one of {', '.join(KINDS)}")
        divisor = divisors[kind]
        if divisor is not None and not divisor > 0:
            raise MisuseError(f"{name} is to be divided by {divisor:g} {loss if kind == 'loss' else kind}")
        normalized[name] = value if divisor is None else value / divisor
    return normalized
