"""Causes of broken rules about the gradients, scales and weights of a step."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .cause import Cause

STEPS: Mapping[str, tuple[Cause, ...]] = MappingProxyType(
    {
        "reduced-once": (
            Cause(
                "finalize_model_grads() is not called, or config.finalize_model_grads_func is not set",
                "all parameters are named, on all ranks",
                "not reduced",
            ),
            Cause(
                "parameters that got no gradient in the last microbatch, with overlap_grad_reduce",
                "some parameters are named, as of experts without tokens, and not on all ranks",
                "not reduced",
            ),
            Cause(
                "microbatches outside no_sync(), or several calls of which each finishes gradients",
                "the number is that of the microbatches, or of the calls, of a step",
                "times",
            ),
            Cause(
                "another optimizer than Megatron's, which does not zero its buffers",
                "from the second step on; nothing calls zero_grad_buffer()",
                "after its reduce",
            ),
            Cause(
                "a call in which the last microbatch is not known as the last",
                "from the first step on, with overlap_grad_reduce only",
                "after its reduce",
            ),
        ),
        "fresh-gradients": (
            Cause(
                "zero_grad_buffer() is not called before the first call of a step",
                "found in every step from the second on",
            ),
            Cause(
                "only the optimizer's gradients are zeroed, or those of one chunk",
                "optimizer.zero_grad() leaves the buffers of chunks as they are",
            ),
            Cause("a call that raised has left its gradients", "the timeline has an exception just before"),
        ),
        "gradients-used": (
            Cause(
                "gradients are zeroed in each call of a step that has several, of which the last finishes them",
                "zero_grad_buffer() is inside the loop over micro- or minibatches",
                "others came",
            ),
            Cause(
                "zeroing and the step are in the wrong order",
                "the line of zero_grad_buffer() is right before that of step()",
                "right before",
            ),
            Cause(
                "the trainer leaves out the other calls of a step that it does not like",
                "found now and then; megapatch.train_step.TrainStep.abort() says that it is meant",
            ),
        ),
        "gradients-dropped": (
            Cause(
                "gradients are zeroed in each call of a step that has several",
                "found in each step; zero_grad_buffer() is inside the loop over minibatches",
            ),
            Cause(
                "the trainer leaves out the step of a batch that it does not like",
                "found now and then; megapatch.train_step.TrainStep.abort() says that it is meant",
            ),
            Cause("gradients are only measured, or are a means to others", "it is meant so: accept the note"),
        ),
        "main-params-agree": (
            Cause(
                "weights were loaded, and not the optimizer's main parameters",
                "the timeline has a load just before; optimizer.reload_model_params() does not follow it",
            ),
            Cause(
                "a reference, an older policy or an average was left in the model",
                "many parameters are named, after a forward-only call or an exception",
            ),
            Cause(
                "a swap leaves out some parameters, or an adapter stays merged",
                "few parameters are named: those of a dtype, a chunk or a layer",
            ),
            Cause(
                "the optimizer was onloaded from an older copy",
                "nothing was loaded or swapped; the weights before the offload are the model's",
            ),
        ),
        "stepped-once": (
            Cause(
                "step() is called by the trainer, and by something that it calls",
                "the line is not that of the trainer's own step; as often as there are steps",
            ),
            Cause("a loop makes steps without a forward-backward call", "as often as it has turns, less one"),
        ),
        "scaled-once": (
            Cause(
                "config.grad_scale_func is not optimizer.scale_loss",
                "it is None, or another optimizer's, as one that was made before",
                "nobody multiplied",
            ),
            Cause(
                "config.grad_scale_func is set after the model has copied its config, or not at all",
                "the loss itself is scaled, by the trainer",
                "auxiliary losses",
            ),
            Cause(
                "the scale changes between the backward pass and the step",
                "the timeline has a load between them; or an overflow of another optimizer's step",
                "was scaled by",
            ),
        ),
        "averaged-alike": (
            Cause(
                "experts have a factor set by hand",
                "the parameters are experts'; the other factor is that of dense layers",
            ),
            Cause("a loss is normalized over ranks by the factor, on purpose", "all buckets have the same one"),
        ),
        "unscaled-once": (
            Cause(
                "prepare_grads() is called before step(), which calls it again",
                "the line of the first is in the trainer, to read the gradients' norm perhaps",
            ),
        ),
        "tokens-counted": (
            Cause(
                "each call of a step normalizes by its own tokens",
                "a step has several calls; gradients are too large by about their number",
                "of the last one",
            ),
            Cause(
                "a microbatch whose tokens are all masked, and a loss that is divided by their number",
                "the sum of that microbatch's loss mask is 0",
                "NaN or infinite",
            ),
            Cause(
                "the loss itself: a logarithm of 0, or a ratio that overflows",
                "the loss mask has tokens; look at that microbatch's log-probabilities",
                "NaN or infinite",
            ),
        ),
        "divided-by-tokens": (
            Cause("the loss is divided by a number of its own, as in Dr. GRPO", "the number is a constant"),
            Cause("the number of tokens is that of one rank, or with padding", "the number varies with the batch"),
        ),
        "every-chunk-steps": (
            Cause("an optimizer was made of some chunks only", "get_megatron_optimizer() was given model[0]"),
            Cause("one of several optimizers is not stepped", "the loop over them ends early"),
            Cause("the optimizer is an earlier model's", "the model was built after it was made", "what had none"),
        ),
        "gradients-kept": (
            Cause(
                "gradients are clipped, scaled or reduced by hand after they were finished",
                "the code between the call and step() has main_grad, grad_data or clip_grad_norm",
            ),
            Cause("an offload in between has replaced them", "found only where something is offloaded"),
        ),
    }
)
"""By rule."""
