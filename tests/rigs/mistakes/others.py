"""Mistakes with modes, ranks and hooks."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

from megapatch.testing import _data
from rigs.megatron.options import BOTH, GRADS
from rigs.mistakes import Table
from rigs.mistakes.gradients import LEARNS
from rigs.mistakes.schedules import schedule_of
from rigs.mistakes.weights import FP32, log_probabilities

MODES, RANKS, HOOKS = map(Table, ("modes", "ranks", "hooks"))
DROPOUT = {"config": {"hidden_dropout": 0.1}}


@MODES.row("trained in eval(), with dropout", {"training-mode": 0}, **DROPOUT)
@MODES.row(
    "trained in eval(), with an auxiliary loss",
    {"training-mode": 0},
    experts=2,
    config={"moe_aux_loss_coeff": 0.1},
)
def trained_in_evaluation_mode(model, step):
    model.chunks[0].eval()
    model.train_step(step)


@MODES.row("layers trained in eval()", {"training-mode": 0}, **DROPOUT)
def layers_in_evaluation_mode(model, step):
    """The model itself is in train()."""
    for layer in model.chunks[0].modules():
        if type(layer).__name__ == "TransformerLayer":
            layer.eval()
    model.train_step(step)


@MODES.row("log-probabilities in train()", {"evaluation-mode": 0}, **DROPOUT)
def log_probabilities_with_dropout(model, step):
    log_probabilities(model, step)
    model.train_step(step)


@MODES.row("each rollout sets the same seed", {"seeded-once": 1}, **DROPOUT)
def seeded_again(model, step):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    model.train_step(step)


@RANKS.row("a schedule advances on one rank only", {"ranks-agree": 2}, **FP32)
def schedule_of_one_rank(model, step):
    schedule = schedule_of(model)
    model.train_step(step)
    if torch.distributed.get_rank() == 0:
        schedule.step(1)


@RANKS.row("weight decay on one rank only", {"ranks-agree": 1}, **FP32)
def decay_of_one_rank(model, step):
    for group in model.optimizer.param_groups:
        group["weight_decay"] = 0.1 * torch.distributed.get_rank()
    model.train_step(step)


@RANKS.row("a rank has more microbatches", {"calls-alike": 1})
def uneven_calls(model, step):
    model.train_step(step, num_microbatches=2 + torch.distributed.get_rank())


@RANKS.row("ranks read the same data", {"data-differs": 1})
def same_data(model, step):
    """A sampler that ignores the rank."""

    def of_the_first_rank(*args, **kwargs):
        with mock.patch("megatron.core.parallel_state.get_data_parallel_rank", return_value=0):
            return microbatches(*args, **kwargs)

    microbatches = _data.microbatches
    with mock.patch.object(_data, "microbatches", of_the_first_rank):
        model.train_step(step)


@RANKS.row("forward passes without the gather", {"ranks-agree": 2}, **BOTH)
def forward_without_the_gather(model, step):
    """NeMo-RL's worker after a split step: hooks stay off."""
    model.train_step(step)
    if model.chunks[0].remove_forward_pre_hook_handles:
        model.chunks[0].disable_forward_pre_hook(param_sync=False)


@RANKS.row("noise of one's own on each rank", {"kept-between-steps": 2, "ranks-agree": 2})
def noise_on_one_rank(model, step):
    """Exploration noise from generators that are seeded differently."""
    if step == 1:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for parameter in model.chunks[0].parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 1e-3)
    model.train_step(step)


@RANKS.row("tensor-parallel ranks drop other elements", {"ranks-agree": 2}, layout={"tp": 2}, **DROPOUT)
def dropout_of_ones_own(model, step):
    """Tensor-parallel ranks are seeded differently outside of what is split."""
    if step == 0:
        torch.manual_seed(torch.distributed.get_rank())
    model.train_step(step)


@RANKS.row("stages have one seed", {"stages-differ": 0}, layout={"pp": 2})
def stages_of_one_seed(model, step):
    """SkyRL, AReaL, verl: all stages are seeded alike."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if step == 0:
        model_parallel_cuda_manual_seed(1)
    model.train_step(step)


@RANKS.row(
    "a load gives expert ranks the same random streams",
    {},
    why="megatron.expert-streams-loaded warns at the load",
    layout={"ep": 2},
    experts=4,
)
def streams_of_the_first_expert_rank(model, step):
    """get_rng_state() saves the streams of the first expert rank for all (Megatron-LM#6858)."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    if step == 1:
        tracker = get_cuda_rng_tracker()
        saved = [tracker.get_states()]
        torch.distributed.broadcast_object_list(saved, 0)
        tracker.set_states(saved[0])
    model.train_step(step)


def nested_no_sync(model, step):
    """The schedule's inner no_sync() ends the outer one, so the first of two calls is reduced (NeMo-RL#3660)."""
    model.zero_grad()
    finalize, sync = model.config.finalize_model_grads_func, model.config.grad_sync_func
    model.config.finalize_model_grads_func = model.config.grad_sync_func = None
    with contextlib.ExitStack() as outer:
        for chunk in model.chunks:
            outer.enter_context(chunk.no_sync())
        model.forward_backward(step)
    model.config.finalize_model_grads_func, model.config.grad_sync_func = finalize, sync
    model.forward_backward(step + 1)
    model.optimizer.step()


if LEARNS:  # before 0.16 an assertion ends it
    HOOKS.row("no_sync() within no_sync()", {"hooks-balanced": 0}, **GRADS)(nested_no_sync)
