"""Correct trainers: how they cut batches, and accumulate, measure, change and leave out gradients."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from rigs.megatron.options import BOTH, GRADS, Interrupted, new_machine, raising_half_way, rerun, rerun_data
from rigs.mistakes import unfinished
from rigs.mistakes.losses import losses_times
from rigs.mistakes.weights import copies_of, log_probabilities, parameters_of, parts_of, put

from megapatch.testing import _data

from .table import Programs, backward, gradients_of, made_once, seen

BATCHES = Programs()
TOKENS = {"per_token_loss": True}


# ------------------------------------------------------------------------------------------ accumulated
def in_halves(model, step, unfinished_calls=(0,), between=lambda: None):
    """Make two calls of a step, each with half of its loss."""
    model.zero_grad()
    with losses_times(0.5):
        for number, data in enumerate(model.microbatches(step)):
            with unfinished(model) if number in unfinished_calls else contextlib.nullcontext():
                model.forward_backward(microbatches=[data])
            between()


@BATCHES.row("two calls, finished in the last", is_plain=True)
def finished_in_the_last(model, step):
    in_halves(model, step)
    model.optimizer.step()


@BATCHES.row("two calls, finished by hand", is_plain=True)
def finished_by_hand(model, step):
    from megatron.core.distributed import finalize_model_grads

    in_halves(model, step, unfinished_calls=(0, 1))
    finalize_model_grads(model.chunks, None)
    model.optimizer.step()


@BATCHES.row("two calls, and the second of this step is evaluated in between", is_plain=True)
def evaluated_between_calls(model, step):
    in_halves(model, step, between=lambda: log_probabilities(model, step + 1))
    model.optimizer.step()


def loop_of_its_own(model, step, context=contextlib.nullcontext):
    """It does not use Megatron's schedules."""
    (ddp,) = model.chunks
    model.zero_grad()
    for number, data in enumerate(model.microbatches(step)):
        with contextlib.nullcontext() if number else context():
            output, loss_of = _data.forward_step(iter([data]), ddp)
            loss, tokens, _ = loss_of(output)
            (loss / tokens / 2).backward()
    ddp.finish_grad_sync()
    model.optimizer.step()


BATCHES.row("a loop of its own", is_plain=True)(loop_of_its_own)


@BATCHES.row("a loop of its own, overlapped", is_plain=True, **GRADS)
def overlapped_loop_of_its_own(model, step):
    loop_of_its_own(model, step, model.chunks[0].no_sync)


@BATCHES.row("zeroed after the step", is_plain=True)
def zeroed_after_the_step(model, step):
    model.forward_backward(step)
    model.optimizer.step()
    model.zero_grad()


@BATCHES.row("zeroed by hand", is_plain=True)
def zeroed_by_hand(model, step):
    torch._foreach_zero_(gradients_of(model))
    model.optimizer.zero_grad()  # in fp32 they are `grad` of each parameter since the last step
    model.forward_backward(step)
    model.optimizer.step()


@BATCHES.row("nothing is reduced over one rank", layout={"tp": 2})
def not_reduced(model, step):
    model.config.finalize_model_grads_func = None
    model.train_step(step)


# ------------------------------------------------------------------------------------------ cut
@BATCHES.row("a microbatch has no tokens", **TOKENS)
def without_tokens(model, step, masked=(1, 1)):
    masks = iter([0.0] * masked[torch.distributed.get_rank()] + [1.0] * 2)
    with mock.patch.object(_data, "loss_mask", lambda labels, _: torch.full(labels.shape, next(masks))):
        model.train_step(step)


@BATCHES.row("a rank is out of data, and trains on what is masked", **TOKENS)
def out_of_data(model, step):
    without_tokens(model, step, masked=(0, 2))


@BATCHES.row("batches grow", **GRADS)
def batches_grow(model, step):
    model.train_step(step, num_microbatches=2 + 2 * step)


@BATCHES.row("sequences grow")
def sequences_grow(model, step):
    model.seq = 4 + 2 * step
    model.train_step(step)


@BATCHES.row("microbatches change in size")
def microbatches_change_in_size(model, step):
    model.train_step(step, micro_batch_size=1 + step)


@BATCHES.row("ranks have other numbers of microbatches, of which tokens count", {"calls-alike": 1}, **TOKENS)
def uneven_ranks(model, step):
    model.train_step(step, num_microbatches=2 + torch.distributed.get_rank())


@BATCHES.row("packed sequences")
def packed(model, step):
    """Samples in a row do not see each other, nor does a loss cross their border."""

    def no_border(labels, _):
        mask = torch.ones(labels.shape)
        mask[:, size // 2 - 1] = 0
        return mask

    size = model.seq
    hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
    hidden[size // 2 :, : size // 2] = True
    with mock.patch.object(torch, "triu", return_value=hidden), mock.patch.object(_data, "loss_mask", no_border):
        model.train_step(step)


# ------------------------------------------------------------------------------------------ measured
@BATCHES.row("norms of gradients are logged by parameter", is_plain=True)
def norms_logged(model, step):
    backward(model, step)
    seen(model, [float(parameter.main_grad.norm()) for parameter in parameters_of(model)])
    model.optimizer.step()


@BATCHES.row("a step is profiled", is_plain=True)
def profiled(model, step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        model.train_step(step)


@BATCHES.row("curvature is estimated now and then", {"gradients-dropped": 2})
def curvature(model, step):
    """As Sophia does: by gradients of labels that the model has drawn itself."""
    if step == 2:
        backward(model, step, seed=1)
        seen(model, [float(grads.square().sum()) for grads in gradients_of(model)])
    model.train_step(step)


@BATCHES.row("evaluated after each step, with and without no_grad()", **BOTH, **TOKENS)
def evaluated(model, step):
    model.train_step(step, masked=True)
    log_probabilities(model, step)
    model.forward_backward(step, forward_only=True, masked=True)


# ------------------------------------------------------------------------------------------ changed
def changed(change):
    """Change gradients once they are finished, in the hook that finishes them."""

    def changed_as_finished(model, step):
        def finalize_and_change(*args, **kwargs):
            finalize(*args, **kwargs)
            change(model, gradients_of(model), torch.Generator().manual_seed(step))

        finalize = model.config.finalize_model_grads_func
        with mock.patch.object(model.config, "finalize_model_grads_func", finalize_and_change):
            model.train_step(step)

    return changed_as_finished


def clipped(model, gradients, _):
    norm = torch.stack([each.norm() for each in gradients]).norm()
    torch._foreach_mul_(gradients, float(1 / max(1.0, norm)))


def noisy(model, gradients, generator):
    for each in gradients:
        each.add_(torch.randn(each.shape, generator=generator), alpha=1e-3)


def near_to_the_first_weights(model, gradients, _):
    model.first = getattr(model, "first", None) or copies_of(model)
    for parameter, first in zip(parameters_of(model), model.first, strict=True):
        parameter.main_grad.add_(parameter.detach() - first, alpha=0.1)


def of_some_only(model, gradients, _):
    for parameter in parameters_of(model):
        parameter.main_grad.mul_(parameter.detach().abs() > 0.1)


def noted_as_changed(name, change):
    BATCHES.row(name, {"gradients-kept": 0})(change)


noted_as_changed("clipped by hand, by the norm of all", changed(clipped))
noted_as_changed("noise is added to gradients", changed(noisy))
noted_as_changed("a penalty's gradient is added (EWC)", changed(near_to_the_first_weights))
noted_as_changed("gradients of pruned weights are masked", changed(of_some_only))


@BATCHES.row("each task's gradient is projected (PCGrad)", {"gradients-dropped": 0, "gradients-kept": 0})
def projected(model, step):
    found = []
    for task in range(2):
        backward(model, step, seed=task)
        found.append(torch.cat(gradients_of(model)))
    one, two = found
    (gradients,) = gradients_of(model)
    gradients.copy_(one + two - min(0.0, float(one @ two / (two @ two))) * two)
    model.optimizer.step()


@BATCHES.row("a layer is frozen by a hook")
def frozen_by_a_hook(model, step):
    for parameter in model.chunks[0].module.decoder.layers[0].parameters() if step == 0 else ():
        parameter.register_hook(torch.zeros_like)
    model.train_step(step)


@BATCHES.row("the loss is scaled by hand, in fp32", {"gradients-kept": 0}, is_plain=True)
def scaled_by_hand(model, step):
    with losses_times(1024.0):
        changed(lambda model, gradients, _: torch._foreach_div_(gradients, 1024.0))(model, step)


# ------------------------------------------------------------------------------------------ left out
@BATCHES.row("a batch with NaN on one rank is left out by all")
def nan_left_out(model, step):
    log_probabilities(model, step)
    is_bad = torch.tensor(float(step == 1 and torch.distributed.get_rank() == 1))
    torch.distributed.all_reduce(is_bad)
    if not is_bad:
        model.train_step(step)


@BATCHES.row("a step with a large gradient is left out", {"gradients-dropped": 1})
def large_left_out(model, step):
    backward(model, step)
    if step != 1:
        model.optimizer.step()


@BATCHES.row("a call that failed is made again, in smaller microbatches", is_plain=True)
def made_again(model, step):
    if step == 1:
        with contextlib.suppress(Interrupted), raising_half_way(model, 1):
            backward(model, step)
    smaller = [part for data in model.microbatches(step) for part in data.split(1)]
    backward(model, step, microbatches=smaller)
    model.optimizer.step()


@BATCHES.row("a step is run again in place, as by Megatron's train_step()", **BOTH)
def rerun_in_place(model, step):
    """The gradients of its first run are zeroed unused. Up to Megatron 0.14 such a fault ends the job."""
    machine, data, runs = made_once(model, "machine", new_machine), rerun_data(0), 0
    if machine is None:
        return
    while machine.should_run_forward_backward(data):
        backward(model, step)
        loss = torch.tensor(float("nan") if (step, runs) == (1, 0) else 1.0)  # the first step validates nothing
        machine.validate_result(loss, rejection_func=torch.isnan, message="NaN", fatal=False)
        runs += 1
    assert runs == (2 if step == 1 else 1)
    ends_job = any(machine.should_checkpoint_and_exit())
    if not ends_job:
        model.optimizer.step()
    if ends_job or step == 2:
        model.machine = rerun().destroy_rerun_state_machine()


@BATCHES.row("a step is made again from the same state, to compare its numbers")
def replayed(model, step):
    weights, states = copies_of(model), [part.state_dict() for part in parts_of(model.optimizer)]
    first = model.train_step(step).loss
    put(model, weights)
    for part, state in zip(parts_of(model.optimizer), states, strict=True):
        part.load_state_dict(state)
    assert model.train_step(step).loss == first
