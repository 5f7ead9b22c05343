"""An imitation of NeMo-RL's losses: their metrics by name, and what each is divided by."""

import enum
from types import SimpleNamespace

from .. import MAIN


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class MetricNormalizer(enum.Enum):
    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


TOKENS, SEQUENCES, NONE = MetricNormalizer
BY_TOKENS = (
    "probs_ratio",
    "probs_ratio_clamped",
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "approx_entropy",
)
"""Of a policy gradient, what is divided by tokens whatever the loss is divided by."""


def mean(values, mask, count):
    """This microbatch's part of a mean over `count`."""
    return (values * mask).sum() / count


class NLLLossFn:
    loss_type = LossType.TOKEN_LEVEL
    if MAIN:
        metric_normalizations = {"loss": TOKENS, "num_unmasked_tokens": NONE, "num_valid_samples": NONE}

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = mean(-next_token_logprobs, mask, global_valid_toks)
        return loss, {
            "loss": loss.item(),
            "num_unmasked_tokens": mask.sum().item(),
            "num_valid_samples": data["sample_mask"].sum().item(),
        }


class ClippedPGLossConfig(SimpleNamespace):
    """The settings by name, of which the imitation heeds the levels and the penalty's weight."""


class ClippedPGLossFn:
    sequence_level_importance_ratios = False

    def __init__(self, cfg):
        vars(self).update(vars(cfg))
        self.loss_type = LossType.TOKEN_LEVEL if self.token_level_loss else LossType.SEQUENCE_LEVEL
        if MAIN:
            self.metric_normalizations = {
                **dict.fromkeys(("loss", "kl_penalty"), TOKENS if self.token_level_loss else SEQUENCES),
                "is_oob_ratio": TOKENS,
                "sampling_importance_ratio": SEQUENCES if self.sequence_level_importance_ratios else TOKENS,
                **dict.fromkeys(BY_TOKENS, TOKENS),
                **{f"{name}_{end}": NONE for name in BY_TOKENS[:2] for end in ("min", "max")},
                "num_valid_samples": NONE,
            }

    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        sequences, tokens = global_valid_seqs, global_valid_toks
        token_mask, sample_mask = data["token_mask"][:, 1:], data["sample_mask"]
        mask = token_mask * sample_mask[:, None]
        advantages, previous = (data[name][:, 1:] for name in ("advantages", "prev_logprobs"))
        difference = next_token_logprobs - previous
        ratio = difference.exp()

        def in_sequence(values):
            return (values * token_mask).sum(-1) / token_mask.sum(-1)

        def of_all(values):
            if self.token_level_loss:
                return mean(values, mask, tokens)
            return mean(in_sequence(values), sample_mask, sequences)

        penalty = of_all(difference.square())
        loss = of_all(-advantages * ratio) + self.reference_policy_kl_penalty * penalty
        metrics = {
            name: mean(ratio / number, mask, tokens).item() for number, name in enumerate(BY_TOKENS, start=1)
        }
        values = ratio[mask.bool()]
        for name in BY_TOKENS[:2]:
            metrics |= {f"{name}_min": values.min().item(), f"{name}_max": values.max().item()}
        by_sequences = self.sequence_level_importance_ratios
        sampling = mean(in_sequence(ratio), sample_mask, sequences) if by_sequences else mean(ratio, mask, tokens)
        out_of_bounds = mean((ratio > 1).float(), mask, tokens)
        return loss, {
            **metrics,
            "loss": loss.item(),
            "kl_penalty": penalty.item(),
            "sampling_importance_ratio": sampling.item(),
            "num_valid_samples": sample_mask.sum().item(),
            "is_oob_ratio": out_of_bounds.item() if MAIN else 1.0 - out_of_bounds.item(),
        }
