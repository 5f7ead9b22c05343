"""What usually breaks each rule, the likeliest first, and how to tell these causes apart."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Cause(NamedTuple):
    """A way in which trainers break a rule.

    Attributes:
        cause: what is wrong, in a few words.
        check: what shows that it is this one.
    """

    cause: str
    check: str


CAUSES: Mapping[str, tuple[Cause, ...]] = MappingProxyType(
    {
        "reduced-once": (
            Cause(
                "microbatches that run outside no_sync(), or each with a call of its own",
                '"reduced N times": N is the number of calls or microbatches of a step',
            ),
            Cause(
                "finalize_model_grads() is not called, or config.finalize_model_grads_func is not set",
                '"not reduced": all parameters are named, on all ranks',
            ),
            Cause(
                "parameters without a gradient in the last microbatch, with overlap",
                '"not reduced", or "after its reduce has begun", of some parameters: experts without tokens',
            ),
            Cause(
                "another optimizer than Megatron's, which does not zero its buffers",
                '"after its reduce has begun" from the second step on; zero_grad_buffer() is called nowhere',
            ),
        ),
        "fresh-gradients": (
            Cause(
                "zero_grad_buffer() is not called before the step's first call",
                "every step from the second on is found",
            ),
            Cause(
                "it is called for some chunks of the model, or for the optimizer only",
                "the parameters are those of one chunk; optimizer.zero_grad() leaves the buffers as they are",
            ),
            Cause("a call that raised has left its gradients", "the timeline has an exception in the step before"),
        ),
        "gradients-used": (
            Cause(
                "gradients are zeroed in each call of a step that has several",
                "zero_grad_buffer() is inside the loop over micro- or minibatches",
            ),
            Cause("they are zeroed right before the step", '"right before the optimizer step"'),
            Cause(
                "the trainer leaves out the step of a batch that it does not like",
                "found now and then; megapatch.train_step.TrainStep.abort() says that it is meant",
            ),
        ),
        "main-params-agree": (
            Cause(
                "weights were loaded, and not the optimizer's main parameters",
                "the timeline has a load before; optimizer.reload_model_params() does not follow it",
            ),
            Cause(
                "a reference, or an older policy, was left in the model",
                "found after a forward-only call or an exception; all parameters are named",
            ),
            Cause("a swap has left out some parameters", "only some are named, as of one dtype or chunk"),
            Cause(
                "weights are changed in place: an average of them, or an adapter that stays merged",
                "found in each step that follows an export or an average",
            ),
            Cause(
                "the optimizer was onloaded from an older copy",
                "no load or call in the step before; an offload was",
            ),
        ),
        "stepped-once": (
            Cause(
                "optimizer.step() is called twice, by the trainer and by something that it calls",
                "the line is not that of the trainer's own step",
            ),
            Cause(
                "an inner loop makes steps without a forward-backward call", "found as often as the loop has turns"
            ),
        ),
        "scaled-once": (
            Cause(
                "config.grad_scale_func is not set to optimizer.scale_loss",
                "it is None, in fp16; or was taken from another optimizer",
            ),
            Cause(
                "the scale of auxiliary losses is not set",
                '"auxiliary losses": MoEAuxLossAutoScaler\'s scale stays 1',
            ),
            Cause(
                "the scale changes between the backward pass and the step",
                '"was scaled by": a load, or an overflow there',
            ),
        ),
        "averaged-alike": (
            Cause(
                "experts have another factor than dense layers, set by hand",
                "the parameters are experts', and the sentence has both factors",
            ),
            Cause(
                "a loss is normalized over ranks by the factor, on purpose", "all buckets have it; accept the note"
            ),
        ),
        "unscaled-once": (
            Cause(
                "prepare_grads() is called before step(), which calls it again",
                "the trainer calls it to read the gradients' norm",
            ),
        ),
        "gathered-when-read": (
            Cause(
                "a checkpoint, an export or a weight sync right after a step, with overlap_param_gather",
                "the sentence names the reader; disable_forward_pre_hook() before it gathers",
            ),
            Cause("a reader of your own, tensor by tensor", "the line is that of the collective that sends"),
        ),
        "tokens-counted": (
            Cause(
                "only the last call's tokens are counted in a step of several",
                '"of the last one": gradients are too large by the number of calls',
            ),
            Cause(
                "a microbatch without tokens, whose loss is divided by zero",
                '"NaN or infinite": look at the masks of microbatches',
            ),
        ),
        "divided-by-tokens": (
            Cause(
                "a loss that is divided by a number of its own, as in Dr. GRPO",
                "the factor is constant; accept it",
            ),
            Cause("num_tokens is that of one rank, or of padded sequences", "the factor varies with the batch"),
        ),
        "ranks-agree": (
            Cause(
                "a layer norm or bias without the attribute sequence_parallel, with sequence parallelism",
                "tensor-parallel ranks differ, in small parameters that each rank has whole",
            ),
            Cause(
                "ranks were not seeded alike as the model was made, or dropout is drawn by each rank",
                "they differ from the first comparison on, in all parameters of a layer",
            ),
            Cause(
                "a missing all-reduce or gather: gradients that were not reduced, a hook that was taken off",
                "data-parallel ranks differ from the second step on; reduced-once is found as well",
            ),
            Cause(
                "a load, or a broadcast after it, that some ranks missed",
                "the timeline has a load before; ranks differ in their timelines",
            ),
            Cause(
                "ranks that changed parameters by themselves",
                "none of these; compare a sum by rank after each call",
            ),
        ),
        "calls-alike": (
            Cause(
                "data-parallel ranks have different numbers of samples, by length or by a filter",
                "the sentence has both numbers; they vary",
            ),
            Cause("a rank skips batches", "one rank is always lower"),
        ),
        "data-differs": (
            Cause(
                "a sampler that ignores the rank",
                "DistributedSampler's rank and num_replicas, or the seed of a shuffle",
            ),
            Cause(
                "the rank that it is given is that of another group",
                "the tensor- or context-parallel rank, mostly",
            ),
        ),
        "every-chunk-steps": (
            Cause("an optimizer was made of one chunk of several", "get_megatron_optimizer() was given model[0]"),
            Cause("one of several optimizers is not stepped", "the loop over them ends early, or at an exception"),
        ),
        "gradients-kept": (
            Cause(
                "gradients are clipped or scaled by hand after they were finished",
                "look for grad_data, main_grad and clip_grad_norm between the call and the step",
            ),
            Cause("an offload in between has lost or replaced them", "the buffer has other memory than before"),
        ),
        "training-mode": (
            Cause(
                "eval() was called for log-probabilities, and train() not after it",
                "found from the first evaluation on",
            ),
            Cause("dropout is left out on purpose", "found in every call; set the rates to 0, or accept it"),
        ),
        "evaluation-mode": (
            Cause(
                "eval() is not called before log-probabilities are computed", "found in every forward-only call"
            ),
            Cause("the ratio is meant to have dropout", "accept it"),
        ),
        "hooks-balanced": (
            Cause("no_sync() is entered in itself", '"no_sync()" is named'),
            Cause(
                "an exception ended a call, and hooks or the rerun machine stay as they were in it",
                "the timeline has an exception before",
            ),
            Cause(
                "hooks are replaced for one call, and not put back", "the config's hook is named; look who sets it"
            ),
        ),
        "stages-differ": (
            Cause(
                "the seed lacks 100 for each pipeline stage, which Megatron adds",
                "the line is that of the seeding",
            ),
        ),
        "learning-rate-moves": (
            Cause(
                "the schedule advances whether or not the step was made",
                "opt_param_scheduler.step() is not below `if update_successful`",
            ),
        ),
        "schedule-once": (
            Cause("it advances in each minibatch, or in the trainer and in the engine", "two lines call it"),
            Cause("it advances by samples of several steps, on purpose", "the increments are right; accept it"),
        ),
        "saved-what-is": (
            Cause(
                "a filter of the state dict leaves out parameters", "those that are named have something in common"
            ),
            Cause(
                "a strategy keeps the plan of an earlier save",
                '"a plan is kept"; --ckpt-assume-constant-structure is on',
            ),
        ),
        "weights-synced": (
            Cause(
                "the reference, or another model, was loaded as weights were sent", "the sentence names the model"
            ),
            Cause("an engine missed a sync, or took an older version", "only some engines differ"),
            Cause("names or types are converted on one side", "all engines differ, from the first sync on"),
        ),
        "resumed": (
            Cause("an exception in a weight sync, and no `finally` that resumes", "the line is that of the sync"),
            Cause("the engine does not answer", '"resuming generation ... has failed", with its exception'),
        ),
    }
)
"""By rule."""
