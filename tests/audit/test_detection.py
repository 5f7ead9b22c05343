"""Each kind of silent defect, on the real Megatron without patches: found where it first acts."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.audit import running_audit
from rigs.cells import AUDITED, run_cells
from rigs.megatron.grad_ready import BUFFER
from rigs.megatron.options import ADAM, BOTH, GRADS, UNPATCHED

from megapatch import audit
from megapatch.testing import _data, init_parallel, tiny_gpt

FP16 = {"dtype": "fp16", "loss_scale": 2.0**10}
LEARNS = "golden_per_param_grad_ready_counts" in BUFFER.read_text()  # from 0.16 on
STEPS = 3


# ------------------------------------------------------------------------ how steps go wrong
def as_megatron_does(model, step):
    model.train_step(step)


def never_zeroed(model, step):
    """SkyRL before accumulation, or a worker after an exception."""
    model.forward_backward(step)
    model.optimizer.step()


def zeroed_in_every_call(model, step):
    """SkyRL before it accumulated."""
    for part in range(2):
        model.zero_grad()
        model.forward_backward(step + part)
    model.optimizer.step()


def zeroed_before_the_step(model, step):
    model.forward_backward(step)
    model.zero_grad()
    model.optimizer.step()


def stepped_twice(model, step):
    """An inner loop that forgets the backward pass."""
    model.train_step(step)
    model.optimizer.step()


def reference_left_in(model, step):
    """The policy's weights are not put back after a pass of the reference."""
    if step == 1:
        for chunk in model.chunks:
            for parameter in chunk.parameters():
                parameter.data.mul_(1.5)
        with torch.no_grad():
            model.forward_backward(step, forward_only=True)
    model.train_step(step)


def one_chunk_of_two(model, step):
    """The optimizer of the second chunk is forgotten."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="sgd", lr=0.1)
    model.firsts = getattr(model, "firsts", None) or get_megatron_optimizer(config, model.chunks[:1])
    model.zero_grad()
    model.forward_backward(step)
    model.firsts.step()


def loaded_without_the_optimizer(model, step):
    """A load of weights alone (SkyRL, verl, AReaL), in the last step."""
    if step == 2:
        model.chunks[0].load_state_dict(model.saved)
    model.saved = {
        name: tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in model.chunks[0].state_dict().items()
    }
    model.train_step(step)


def torchs_optimizer(model, step):
    """The loop of Megatron's own examples/run_simple_mcore_train_loop.py: it neither zeroes nor uses main_grad."""
    model.torchs = getattr(model, "torchs", None) or torch.optim.Adam(model.chunks[0].parameters())
    model.torchs.zero_grad()
    model.forward_backward(step)
    model.torchs.step()


def reduced_in_every_call(model, step):
    """A step of two calls, each of which finishes gradients (NeMo-RL, SkyRL)."""
    model.zero_grad()
    model.forward_backward(step)
    model.forward_backward(step + 1)
    model.optimizer.step()


def never_reduced(model, step):
    model.zero_grad()
    model.config.finalize_model_grads_func = None
    model.forward_backward(step)
    model.optimizer.step()


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


def more_microbatches_than_the_first_step(model, step):
    model.config.no_sync_func = contextlib.nullcontext
    model.train_step(step, num_microbatches=2 + 2 * (step > 0))


def tokens_of_the_last_call(model, step):
    """Calls before the last leave finishing to it, and their tokens are lost."""
    model.zero_grad()
    finalize, model.config.finalize_model_grads_func = model.config.finalize_model_grads_func, None
    model.forward_backward(step, masked=True)
    model.config.finalize_model_grads_func = finalize
    model.forward_backward(step + 1, masked=True)
    model.optimizer.step()


def one_loss_is_nan(model, step):
    def nan(*args, **kwargs):
        loss, *others = loss_function(*args, **kwargs)
        return loss * float("nan"), *others

    loss_function = _data.loss_function
    with mock.patch.object(_data, "loss_function", nan) if step == 1 else contextlib.nullcontext():
        model.zero_grad()
        model.forward_backward(step)
    model.optimizer.step()


def prepared_twice(model, step):
    """slime before #1842."""
    model.zero_grad()
    model.forward_backward(step)
    model.optimizer.prepare_grads()
    model.optimizer.step()


def loss_not_scaled(model, step):
    """ROLL, SkyRL."""
    model.config.grad_scale_func = None
    model.train_step(step)


def only_the_main_loss_scaled(model, step):
    """AReaL: the trainer multiplies its own loss, in its loss function."""
    model.config.grad_scale_func = None
    model.zero_grad()
    model.optimizer.get_loss_scale()
    model.forward_backward(step)
    model.optimizer.step()


def scale_changed_in_between(model, step):
    model.zero_grad()
    model.forward_backward(step)
    for part in model.optimizer.chained_optimizers:
        part.grad_scaler._scale = part.grad_scaler._scale * 2
    model.optimizer.step()


def read_before_the_gather(read):
    def step_and_read(model, step):
        model.train_step(step)
        read(model.chunks[0])

    return step_and_read


def forward_without_the_gather(model, step):
    """NeMo-RL's worker after a split step: hooks stay off."""
    model.train_step(step)
    if model.chunks[0].remove_forward_pre_hook_handles:
        model.chunks[0].disable_forward_pre_hook(param_sync=False)


def one_rank_differs(model, step):
    """A rank that missed a broadcast."""
    model.train_step(step)
    if step == 0 and torch.distributed.get_rank() == 1:
        for name, parameter in model.chunks[0].module.named_parameters():
            if name.endswith("final_layernorm.weight"):
                parameter.data[3] += 1e-3


def schedule_moves_after_an_overflow(model, step):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    schedule = OptimizerParamScheduler(
        model.optimizer, init_lr=0.0, max_lr=0.1, min_lr=0.0, lr_warmup_steps=2, lr_decay_steps=9,
        lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=9, wd_incr_style="constant",
    )  # fmt: skip
    model.zero_grad()
    model.forward_backward(step)
    model.chunks[0].buffers[0].grad_data[0] = torch.inf
    model.optimizer.step()
    schedule.step(1)


CASES = {  # layout, options, the step, and what is found after how many steps
    "as Megatron does": ({}, BOTH, as_megatron_does, {}),
    "never zeroed": ({}, {}, never_zeroed, {"fresh-gradients": 1}),
    "zeroed in every call": ({}, {}, zeroed_in_every_call, {"gradients-used": 0}),
    "the same with overlap": ({}, BOTH, zeroed_in_every_call, {"gradients-used": 0}),
    "zeroed before the step": ({}, {}, zeroed_before_the_step, {"gradients-used": 0}),
    "stepped twice": ({}, {}, stepped_twice, {"stepped-once": 1}),
    "reference left in": ({}, {"dtype": "bf16"}, reference_left_in, {"main-params-agree": 2}),
    "reference left in, sharded": (
        {},
        {"dtype": "bf16", **ADAM, "use_distributed_optimizer": True},
        reference_left_in,
        {"main-params-agree": 2},
    ),
    "loaded without the optimizer": (
        {},
        {"dtype": "bf16"},
        loaded_without_the_optimizer,
        {"main-params-agree": 3},
    ),
    "one chunk of two": ({"pp": 2, "vpp": 2}, {}, one_chunk_of_two, {"every-chunk-steps": 1}),
    "torch's optimizer": ({}, {}, torchs_optimizer, {"reduced-once": 0}),
    "reduced in every call": ({}, {}, reduced_in_every_call, {"reduced-once": 0}),
    "never reduced": ({}, {}, never_reduced, {"reduced-once": 0, "ranks-agree": 2}),
    "tokens of the last call": ({}, {"per_token_loss": True}, tokens_of_the_last_call, {"tokens-counted": 1}),
    "one loss is NaN": ({}, {}, one_loss_is_nan, {"tokens-counted": 2}),
    "one loss is NaN, and the step skipped": ({}, FP16, one_loss_is_nan, {}),
    "prepared twice": (
        {},
        {**FP16, **ADAM, "use_distributed_optimizer": True},
        prepared_twice,
        {"unscaled-once": 0},
    ),
    "loss not scaled": ({}, FP16, loss_not_scaled, {"scaled-once": 0}),
    "only the main loss scaled": (
        {},
        {**FP16, "experts": 2, "config": {"moe_aux_loss_coeff": 0.1}},
        only_the_main_loss_scaled,
        {"scaled-once": 0},
    ),
    "scale changed in between": ({}, FP16, scale_changed_in_between, {"scaled-once": 0}),
    "state_dict": (
        {},
        BOTH,
        read_before_the_gather(lambda ddp: ddp.module.state_dict()),
        {"gathered-when-read": 1},
    ),
    "sharded_state_dict": (
        {},
        BOTH,
        read_before_the_gather(lambda ddp: ddp.sharded_state_dict()),
        {"gathered-when-read": 1},
    ),
    "sent": (
        {},
        BOTH,
        read_before_the_gather(lambda ddp: torch.distributed.broadcast(next(ddp.parameters()).data, 0)),
        {"gathered-when-read": 1},
    ),
    "one rank differs": ({}, {}, one_rank_differs, {"ranks-agree": 2}),
    "one rank of tensor parallelism differs": ({"tp": 2}, {}, one_rank_differs, {"ranks-agree": 2}),
    "forward without the gather": ({}, BOTH, forward_without_the_gather, {"ranks-agree": 2}),
    "learning rate after an overflow": ({}, FP16, schedule_moves_after_an_overflow, {"learning-rate-moves": 1}),
}
if LEARNS:  # before 0.16 an assertion ends both
    CASES["nested no_sync"] = ({}, GRADS, nested_no_sync, {"hooks-balanced": 0})
    CASES["more microbatches than the first step"] = (
        {},
        GRADS,
        more_microbatches_than_the_first_step,
        {"reduced-once": 1, "ranks-agree": 3},
    )


def found(case):
    layout, options, take_step, _ = CASES[case]
    init_parallel(**layout)
    audit.clear()
    model = tiny_gpt(layers=4, **options)
    before = running_audit().ledger.step
    for step in range(STEPS):
        take_step(model, step)
    return [(one.invariant, one.step - before, one.rank, str(one)) for one in audit.findings()]


def same_seed():
    """SkyRL, AReaL, verl: all stages are seeded alike."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    init_parallel(pp=2)
    audit.clear()
    model_parallel_cuda_manual_seed(1)
    tiny_gpt(layers=4).train_step()
    return [one.invariant for one in audit.findings()]


def job(rank, world_size):
    for case in CASES:
        yield case, partial(found, case)
    yield "same seed", same_seed


@pytest.fixture(scope="module")
def ranks():
    return run_cells(job, 2, env={**UNPATCHED, **AUDITED})


@pytest.mark.parametrize("case", CASES)
def test_it_is_found_where_it_first_acts(ranks, case):
    expected = CASES[case][-1]
    for rank, cells in enumerate(ranks):
        results = cells[case]
        assert {invariant: step for invariant, step, _, _ in results} == expected, results
        assert {where for _, _, where, _ in results} <= {rank}


def test_stages_with_one_seed_are_found(ranks):
    assert [cells["same seed"] for cells in ranks] == [["stages-differ"]] * 2
