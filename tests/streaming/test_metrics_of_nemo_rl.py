"""NeMo-RL's rules for the metrics of a step's microbatches."""

from __future__ import annotations

import math

from megapatch.streaming.nemo_rl import _reduced


def test_infinite_extremes_do_not_count_and_without_others_there_is_minus_one():
    result = {
        "loss": 2,
        "grad_norm": None,
        "all_mb_metrics": {
            "probs_ratio_min": [0.5, math.inf, 0.25],
            "probs_ratio_max": [1.5, -math.inf, 1.25],
            "probs_ratio_clamped_min": [math.inf],
            "num_valid_samples": [3, 4],
            "lr": [0.1, 0.3],
        },
    }
    assert _reduced(result) == {
        "loss": 2.0,
        "probs_ratio_min": 0.25,
        "probs_ratio_max": 1.5,
        "probs_ratio_clamped_min": -1.0,
        "num_valid_samples": 7.0,
        "lr": 0.2,
    }
