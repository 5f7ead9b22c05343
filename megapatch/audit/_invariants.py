"""The rules that every step has to keep, in any trainer, and the damage of breaking one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Invariant(NamedTuple):
    """A rule of Megatron's that repeated calls break.

    Attributes:
        rule: one sentence.
        means: the damage that a step that breaks it does to training.
        repairs: patches that repair known ways of breaking it.
        is_note: whether trainers may break it on purpose, so that it is no finding but a note.
    """

    rule: str
    means: str
    repairs: tuple[str, ...] = ()
    is_note: bool = False


INVARIANTS: Mapping[str, Invariant] = MappingProxyType(
    {
        "reduced-once": Invariant(
            "Between zeroing and the optimizer step every bucket that received gradients is reduced once, and "
            "nothing is added to it after its reduce began.",
            "Data-parallel ranks step with different gradients, or with gradients that are wrong by a factor.",
            (
                "megatron.grad-ready-window",
                "megatron.nested-no-sync",
                "megatron.parameters-without-gradients",
                "nemo_rl.hooks-without-overlap",
                "skyrl.accumulate-forward-backward",
            ),
        ),
        "fresh-gradients": Invariant(
            "The first gradient after an optimizer step is added to a buffer that was zeroed.",
            "Each step repeats the gradients of the steps before it.",
            ("nemo_rl.train-after-exception",),
        ),
        "gradients-used": Invariant(
            "Gradients that have arrived are used by an optimizer step before they are zeroed.",
            "A step of several calls trains on the last of them only, or on nothing.",
        ),
        "gradients-dropped": Invariant(
            "Gradients that were reduced are used by an optimizer step before they are zeroed.",
            "A step of several calls trains on the last of them only, unless they were dropped on purpose.",
            ("skyrl.accumulate-forward-backward",),
            is_note=True,
        ),
        "gradients-arrive": Invariant(
            "Each parameter that is trained has a gradient in a step, if others have.",
            "It stays as it is: it was frozen after the model was wrapped, or is under no_grad().",
            is_note=True,
        ),
        "main-params-agree": Invariant(
            "In half precision an optimizer step begins from the parameters that the model has.",
            "The step undoes what was put into the model: a load, or weights that were swapped in or out.",
            ("megatron.main-params-after-load",),
        ),
        "kept-between-steps": Invariant(
            "Moments, and weights in fp32, are at a step's beginning what the last step has left, or were loaded.",
            "The step is made from other weights or moments: swapped, lost in an offload, or of an older copy.",
            is_note=True,
        ),
        "loaded-is-there": Invariant(
            "After a load, moments, step counts and the schedule are what was loaded.",
            "Training continues as another run: with moments of zero, or at another learning rate.",
            ("areal.load-optimizer-state", "megatron.scheduler-after-load"),
        ),
        "resumed-together": Invariant(
            "An optimizer and its schedule are loaded together.",
            "The learning rate begins from the start, or moments do.",
            ("verl.schedule-after-load",),
            is_note=True,
        ),
        "stepped-once": Invariant(
            "An optimizer steps once on the same gradients.",
            "The step is made twice, or a forward-backward call is missing.",
        ),
        "scaled-once": Invariant(
            "The loss, and every auxiliary loss, is multiplied by the loss scale that the optimizer divides by.",
            "Gradients are wrong by the loss scale: far too small, or those of one loss against another's.",
            ("areal.aux-loss-scale", "roll.grad-scale", "skyrl.grad-scale"),
        ),
        "averaged-alike": Invariant(
            "Gradients of a bucket are multiplied by the factor that DistributedDataParallel has computed for it.",
            "Parameters of that bucket learn at another rate, as experts that are averaged over other ranks.",
            is_note=True,
        ),
        "unscaled-once": Invariant(
            "The optimizer divides the gradients of a step by the loss scale once.",
            "Gradients are too small by the loss scale.",
            ("megatron.prepare-grads-once",),
        ),
        "gathered-when-read": Invariant(
            "Parameters that an optimizer step has left to be gathered are not read before that.",
            "The copy that is saved or sent is a mixture: this rank's shard is new, all others are one step old.",
            (
                "megatron.gathered-when-read",
                "areal.gathered-when-read",
                "nemo_rl.gathered-when-read",
                "nemo_rl.forward-pre-hook-after-split",
                "skyrl.gathered-when-read",
                "verl.gathered-when-read",
            ),
        ),
        "tokens-counted": Invariant(
            "The gradients of a step are divided by the tokens of all its calls, and no loss is NaN.",
            "Gradients are too large, by as much as the step has calls; or parameters become NaN.",
            ("megatron.zero-tokens",),
        ),
        "fresh-counts": Invariant(
            "The token counts of routers are zero as a step's first call begins.",
            "The expert bias and auxiliary losses count the tokens of a step that was dropped.",
        ),
        "divided-by-tokens": Invariant(
            "With calculate_per_token_loss, gradients are divided by the number of their tokens.",
            "They are larger or smaller by a factor, which some losses, as of Dr. GRPO, mean to have.",
            is_note=True,
        ),
        "ranks-agree": Invariant(
            "Parameters are the same on all data-parallel ranks, and replicated ones on all ranks of their group.",
            "Ranks train different models, whose gradients are averaged all the same.",
            ("megatron.parameters-without-gradients", "nemo_rl.forward-pre-hook-after-split"),
        ),
        "calls-alike": Invariant(
            "Data-parallel ranks train on as many microbatches.",
            "Samples of a rank that has fewer weigh more, where gradients are averaged over ranks.",
            is_note=True,
        ),
        "data-differs": Invariant(
            "Data-parallel ranks train on different data.",
            "The batch is as many times smaller as there are ranks, as with a sampler that ignores the rank.",
            is_note=True,
        ),
        "every-chunk-steps": Invariant(
            "An optimizer steps all chunks of a model that had gradients in a forward-backward call.",
            "Some layers never learn.",
        ),
        "gradients-kept": Invariant(
            "An optimizer step uses the gradients that finalize_model_grads() has finished.",
            "They were scaled, clipped or reduced by hand, which is easily done twice, or on one rank only.",
            is_note=True,
        ),
        "training-mode": Invariant(
            "A call that trains runs the model in train().",
            "The model trains without its dropout, or without the auxiliary losses of its routers.",
            is_note=True,
        ),
        "evaluation-mode": Invariant(
            "A forward-only call, as for log-probabilities, runs the model in eval().",
            "Log-probabilities are those of the model with some elements dropped at random.",
            is_note=True,
        ),
        "hooks-balanced": Invariant(
            "A forward-backward call leaves the hooks of the model's config, its timers, no_sync and the rerun "
            "machine as it found them.",
            "Later calls reduce too early, twice, or not at all; or a step is skipped.",
            (
                "megatron.nested-no-sync",
                "megatron.train-reentry",
                "nemo_rl.abort-resets-rerun",
                "nemo_rl.train-after-exception",
                "slime.train-reentry",
            ),
        ),
        "stages-differ": Invariant(
            "Pipeline stages draw different random numbers.",
            "Layers at the same place of different stages start from the same weights, and drop the same "
            "elements.",
            ("areal.pipeline-seed", "skyrl.pipeline-seed", "verl.pipeline-seed"),
            is_note=True,
        ),
        "expert-streams-differ": Invariant(
            "Expert-parallel ranks draw different random numbers.",
            "Experts of different ranks drop the same elements, as after a load of one rank's streams.",
            is_note=True,
        ),
        "learning-rate-moves": Invariant(
            "The learning rate's schedule advances after successful steps only.",
            "Each overflow costs a step of warm-up or decay.",
            ("verl.overflow-is-skipped", "ms_swift.overflow-is-skipped", "roll.overflow-is-skipped"),
        ),
        "schedule-once": Invariant(
            "The learning rate's schedule advances at most once for each optimizer step.",
            "Warm-up and decay are over too soon.",
            is_note=True,
        ),
        "schedule-moves": Invariant(
            "The learning rate's schedule advances, unless its rates are constant.",
            "All steps are made at the first learning rate, which is 0 where there is a warm-up.",
            is_note=True,
        ),
        "saved-what-is": Invariant(
            "A checkpoint that has a model has all that is trained of it, and is not saved by the plan of "
            "another.",
            "The checkpoint lacks something that the next load needs.",
            ("megatron.rerun-state-dict", "megatron.save-plan-cache"),
        ),
        "saved-is-trained": Invariant(
            "A checkpoint has the weights that the optimizer steps, as they are when it is written.",
            "The run continues from another model: a reference, an average, or the weights of an earlier step.",
            is_note=True,
        ),
        "weights-synced": Invariant(
            "Generation has received the weights that were trained, version by version.",
            "Rollouts come from another model than the one that is trained on them.",
            ("slime.first-sync-pushes-actor",),
        ),
        "resumed": Invariant(
            "Generation that was paused for a weight sync is resumed, however the sync ends.",
            "Requests are never answered, and training waits for rollouts that do not come.",
            ("areal.weight-sync-resume", "skyrl.async-trainer-resume", "skyrl.pause-rollback"),
        ),
    }
)
"""The rules, by name, in the order of the page."""
