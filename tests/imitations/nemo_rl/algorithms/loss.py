"""An imitation of NeMo-RL's losses: their metrics by name, and what each is divided by."""

import enum
from types import SimpleNamespace

import torch

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


def divergence(logprobs, reference):
    difference = reference - logprobs
    return difference.exp() - 1 - difference


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
    """The settings by name. Some say what the tests' say, whatever they say: the penalty's type is k3, nothing is
    clamped, importance sampling is corrected for."""


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
        logprobs, sequences, tokens = next_token_logprobs, global_valid_seqs, global_valid_toks
        token_mask, sample_mask = data["token_mask"][:, 1:], data["sample_mask"]
        mask = token_mask * sample_mask[:, None]
        names = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
        advantages, previous, sampled, reference = (data[name][:, 1:] for name in names)

        def in_sequence(values):
            return (values * token_mask).sum(-1) / token_mask.sum(-1)

        def of_all(values):
            if self.token_level_loss:
                return mean(values, mask, tokens)
            return mean(in_sequence(values), sample_mask, sequences)

        ratio, weight = logprobs - previous, previous - sampled
        if self.sequence_level_importance_ratios:
            ratio = in_sequence(ratio)[:, None].expand_as(mask)
            weight = (weight * mask).sum(-1, keepdim=True).expand_as(mask)
        ratio, weight = ratio.exp(), weight.exp()
        clamped = ratio.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)

        lowest, highest = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        if self.truncated_importance_sampling_type == "icepop":
            kept = ((lowest <= weight) & (weight <= highest)).float()
            weight = weight * kept
        else:
            kept = (weight <= highest).float()
            weight = weight.clamp(max=highest)

        penalty = of_all((logprobs - sampled).exp().detach() * divergence(logprobs, reference))
        loss = of_all(weight * torch.max(-advantages * ratio, -advantages * clamped))
        loss = loss + self.reference_policy_kl_penalty * penalty
        mixture = (previous.exp() / 2 + sampled.exp() / 2).log()
        by_tokens = (
            ratio,
            clamped,
            (sampled - previous).abs().exp(),
            divergence(sampled, previous),
            divergence(previous, sampled),
            (divergence(mixture, previous) + divergence(mixture, sampled)) / 2,
            -(logprobs - sampled).exp() * logprobs,
        )
        metrics = {
            name: mean(values, mask, tokens).item() for name, values in zip(BY_TOKENS, by_tokens, strict=True)
        }
        for name, values in zip(BY_TOKENS[:2], by_tokens[:2], strict=True):
            values = values[mask.bool()]
            metrics |= {f"{name}_min": values.min().item(), f"{name}_max": values.max().item()}
        if self.sequence_level_importance_ratios:
            sampling = mean(weight[:, 0], sample_mask, sequences)
        else:
            sampling = mean(weight, mask, tokens)
        metrics["loss"], metrics["kl_penalty"] = loss.item(), penalty.item()
        metrics["sampling_importance_ratio"] = sampling.item()
        metrics["num_valid_samples"] = sample_mask.sum().item()
        metrics["is_oob_ratio"] = (
            mean(1 - kept, mask, tokens).item() if MAIN else 1.0 - mean(kept, mask, tokens).item()
        )
        return loss, metrics
