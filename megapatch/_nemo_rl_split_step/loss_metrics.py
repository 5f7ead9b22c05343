"""Metrics of NeMo-RL's losses that were computed before the totals of the step were known, corrected."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

from ..train_step import NLL, POLICY_GRADIENT, normalize_metrics

OUT_OF_BOUNDS = "is_oob_ratio"


def normalized(
    loss_fn: Any, metrics: Mapping[str, Any], *, expected_count: float, tokens: float, sequences: float
) -> dict[str, Any]:
    """Return a microbatch's metrics as train() has them.

    Args:
        expected_count: divisor of losses and metrics until now, in place of tokens and of sequences.
        tokens: those of the step that count, over all data-parallel ranks.
        sequences: those of the step that count, over all data-parallel ranks.
    """
    divided = functools.partial(
        normalize_metrics,
        tokens=(tokens or 1.0) / expected_count,
        sequences=(sequences or 1.0) / expected_count,
        loss="tokens" if by_tokens(loss_fn) else "sequences",
        kinds=kinds_of(loss_fn),
    )
    found = divided(metrics)
    kind: type = type(loss_fn)
    if OUT_OF_BOUNDS in metrics and _is_one_minus_mean(kind):
        # 1 for each sequence whose metric was computed separately (without packing, 1 for all), minus a mean that
        # is below 1 as long as `expected_count` is more than all tokens.
        value = metrics[OUT_OF_BOUNDS]
        ones = math.ceil(value)
        found[OUT_OF_BOUNDS] = ones - divided({OUT_OF_BOUNDS: ones - value})[OUT_OF_BOUNDS]
    return found


def by_tokens(loss_fn: Any) -> bool:
    """Return whether the loss is divided by tokens, and not by sequences."""
    return getattr(getattr(loss_fn, "loss_type", None), "name", "TOKEN_LEVEL") == "TOKEN_LEVEL"


def kinds_of(loss_fn: Any) -> dict[str, str]:
    """Return the divisor of each metric, as NeMo-RL main's losses declare; before that, names decide."""
    declared = getattr(loss_fn, "metric_normalizations", None)
    if isinstance(declared, dict):
        return {name: kind.name.lower() for name, kind in declared.items()}
    kinds = {**NLL, **POLICY_GRADIENT}
    if getattr(loss_fn, "sequence_level_importance_ratios", False):
        kinds["sampling_importance_ratio"] = "sequences"
    if getattr(loss_fn, "truncated_importance_sampling_type", None) == "seq-mask-tis":
        kinds[OUT_OF_BOUNDS] = "sequences"
    return kinds


@functools.cache  # called for each microbatch
def _is_one_minus_mean(kind: type) -> bool:
    """Return whether is_oob_ratio is 1 minus a mean of those in bounds, as in v0.6.0; later it is a mean."""
    try:
        source = inspect.getsource(kind.__call__)
    except (OSError, TypeError, AttributeError):
        return False
    return re.search(rf'"{OUT_OF_BOUNDS}":\s*1(\.0)?\s*-', source) is not None
