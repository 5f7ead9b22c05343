"""Mistakes with gradients."""

from __future__ import annotations

import contextlib

import torch

from megapatch.testing import tiny_gpt
from rigs.megatron.grad_ready import BUFFER
from rigs.megatron.options import BOTH, GRADS, Interrupted, raising_half_way
from rigs.mistakes import Table, other_optimizer, unfinished
from rigs.mistakes.weights import SHARDED

LEARNS = "golden_per_param_grad_ready_counts" in BUFFER.read_text()  # from 0.16 on

TABLE = Table("gradients")


@TABLE.row("never zeroed", {"fresh-gradients": 1})
def never_zeroed(model, step):
    """SkyRL before accumulation, or a worker after an exception."""
    model.forward_backward(step)
    model.optimizer.step()


@TABLE.row("zeroed in every call", {"gradients-dropped": 0})
@TABLE.row("zeroed in every call, with overlap", {"gradients-dropped": 0}, **BOTH)
def zeroed_in_every_call(model, step):
    """SkyRL before it accumulated."""
    for part in range(2):
        model.zero_grad()
        model.forward_backward(step + part)
    model.optimizer.step()


@TABLE.row("zeroed in every call, and finished in the last", {"gradients-dropped": 0})
def zeroed_in_every_call_but_one(model, step):
    """Only the last call of a step finishes gradients, and each zeroes them."""
    for part, finishing in enumerate((unfinished(model), contextlib.nullcontext())):
        model.zero_grad()
        with finishing:
            model.forward_backward(step + part)
    model.optimizer.step()


@TABLE.row("zeroed right before the step", {"gradients-used": 0})
@TABLE.row("zeroed right before the step, sharded", {"gradients-used": 0}, **SHARDED)
def zeroed_before_the_step(model, step):
    model.forward_backward(step)
    model.zero_grad()
    model.optimizer.step()


@TABLE.row("the optimizer steps twice", {"stepped-once": 1})
@TABLE.row("the optimizer steps twice, sharded", {"stepped-once": 1}, **SHARDED)
def stepped_twice(model, step):
    model.train_step(step)
    model.optimizer.step()


@TABLE.row("an inner loop without a backward pass", {"stepped-once": 1})
def backward_forgotten_in_an_inner_loop(model, step):
    model.train_step(step)
    for _ in range(2):
        model.optimizer.step()


@TABLE.row("torch's optimizer on Megatron's DistributedDataParallel", {"reduced-once": 0})
def torchs_optimizer(model, step):
    """The loop of Megatron's own examples/run_simple_mcore_train_loop.py: it neither zeroes nor uses main_grad."""
    model.torchs = getattr(model, "torchs", None) or torch.optim.Adam(model.chunks[0].parameters())
    model.torchs.zero_grad()
    model.forward_backward(step)
    model.torchs.step()


@TABLE.row("reduced in every call", {"reduced-once": 0})
@TABLE.row("reduced in every call, sharded", {"reduced-once": 0}, **SHARDED)
def reduced_in_every_call(model, step):
    """A step of two calls, each of which finishes gradients (NeMo-RL, SkyRL)."""
    model.zero_grad()
    model.forward_backward(step)
    model.forward_backward(step + 1)
    model.optimizer.step()


@TABLE.row("never reduced", {"reduced-once": 0, "ranks-agree": 2})
def never_reduced(model, step):
    model.zero_grad()
    model.config.finalize_model_grads_func = None
    model.forward_backward(step)
    model.optimizer.step()


def more_microbatches_than_the_first_step(model, step):
    model.config.no_sync_func = contextlib.nullcontext
    model.train_step(step, num_microbatches=2 + 2 * (step > 0))


if LEARNS:  # before 0.16 an assertion ends it
    TABLE.row(
        "more microbatches than in the first step, without no_sync", {"reduced-once": 1, "ranks-agree": 3}, **GRADS
    )(more_microbatches_than_the_first_step)


def changed_by(change):
    def change_and_step(model, step):
        model.zero_grad()
        model.forward_backward(step)
        for buffer in model.chunks[0].buffers:
            change(buffer.grad_data)
        model.optimizer.step()

    return change_and_step


def offloaded_and_lost(grads):
    grads.untyped_storage().resize_(0)
    grads.untyped_storage().resize_(grads.numel() * grads.element_size())
    grads.zero_()


TABLE.row("scaled by hand after they were finished", {"gradients-kept": 0})(
    changed_by(lambda grads: grads.mul_(0.5))
)
TABLE.row("clipped by this rank's own norm", {"gradients-kept": 0})(
    changed_by(lambda grads: grads.div_(max(1.0, float(grads.norm()))))
)
TABLE.row("lost by an offload", {"gradients-kept": 0})(changed_by(offloaded_and_lost))
TABLE.row("zeroed through .data", {"gradients-kept": 1})(changed_by(lambda grads: grads.data.zero_()))


@TABLE.row("one chunk of two has no optimizer", {"every-chunk-steps": 1}, layout={"pp": 2, "vpp": 2})
def one_chunk_of_two(model, step):
    """The optimizer of the second chunk is forgotten."""
    model.firsts = getattr(model, "firsts", None) or other_optimizer(model, model.chunks[:1])
    model.zero_grad()
    model.forward_backward(step)
    model.firsts.step()


@TABLE.row("the optimizer of an earlier model", {"every-chunk-steps": 1})
def optimizer_of_an_earlier_model(model, step):
    """The model is built again after its optimizer was made."""
    if step == 0:
        model.earlier = tiny_gpt(layers=1)  # or ranks would free it at different times, and wait for each other
        model.optimizer = model.earlier.optimizer
    model.train_step(step)


@TABLE.row(
    "experts' gradients have a factor set by hand",
    {},
    why="a trainer may mean its factor",
    layout={"ep": 2},
    experts=2,
)
def experts_averaged_otherwise(model, step):
    for buffer in model.chunks[0].expert_parallel_buffers:
        for bucket in buffer.buckets:
            bucket.gradient_scaling_factor = 1.0
    model.train_step(step)


@TABLE.row("a head replaced after it was wrapped", {"gradients-arrive": 0})
def head_replaced(model, step):
    if step == 0:
        gpt = model.chunks[0].module
        gpt.output_layer.weight = torch.nn.Parameter(gpt.output_layer.weight.detach().clone())
    model.train_step(step)


@TABLE.row("layers frozen after they were wrapped", {"gradients-arrive": 0})
def frozen_and_forgotten(model, step):
    for name, parameter in model.chunks[0].module.named_parameters():
        if "layers.1." in name:
            parameter.requires_grad = False
    model.train_step(step)


@TABLE.row("layers frozen after some steps", {"gradients-arrive": 1})
def frozen_after_some_steps(model, step):
    (frozen_and_forgotten if step else type(model).train_step)(model, step)


@TABLE.row("layers under no_grad() after some steps", {"gradients-arrive": 1})
def without_gradients_from_step_1(model, step):
    """A layer is run under no_grad(), as one of a reference."""
    layer = model.chunks[0].module.decoder.layers[1].mlp
    if step == 1:
        forward = layer.forward

        def without(*args, **kwargs):
            with torch.no_grad():
                return forward(*args, **kwargs)

        layer.forward = without
    model.train_step(step)


# ------------------------------------------------------------------------ counts of routers
COUNTING = {
    "experts": 2,
    "config": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
}


@TABLE.row("tokens of an aborted call stay counted", {"fresh-counts": 2}, **COUNTING)
def tokens_of_an_aborted_call(model, step):
    """A call that raises, as for want of memory, and is made again with fresh gradients."""
    if step == 1:
        model.zero_grad()
        with contextlib.suppress(Interrupted), raising_half_way(model, 1):
            model.forward_backward(step)
    model.train_step(step)


@TABLE.row("tokens of a dropped call stay counted", {"fresh-counts": 2, "gradients-dropped": 1}, **COUNTING)
def tokens_of_a_dropped_call(model, step):
    """Gradients of a batch are dropped before they are finished."""
    if step == 1:
        model.zero_grad()
        with unfinished(model):
            model.forward_backward(step)
    model.train_step(step)


@TABLE.row("tokens of log-probabilities are counted", {"fresh-counts": 2}, **COUNTING)
def tokens_of_log_probabilities(model, step):
    """They are computed without no_grad()."""
    if step == 1:
        model.forward_backward(step, forward_only=True)
    model.train_step(step)
