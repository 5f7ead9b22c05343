"""Gradients that are reduced twice, too early, or not at all, or have a wrong scale; and parameters that are read
before they are gathered."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from ...errors import MisuseError
from ...patch import unpatched
from ..check import DP, Check, DefectSeen, Layout, expect, same, the_defect
from ._steps import BOTH, OVERLAP, SHARDED, fast_network, sequence, step_in_calls


def calls_in_varying_number(layout: Layout = DP) -> float | None:
    """Make steps of several calls whose gradients are finished after the last one, as SkyRL does."""
    layout.set_up()
    if not hasattr(layout.model(**OVERLAP).chunks[0].bucket_groups[0], "is_first_batch"):
        return None  # up to 0.15 a step has one call
    largest = 0.0
    for calls in ((1, 2, 3), (2, 1)):
        with fast_network(), the_defect(AssertionError, says="has not been issued|outstanding at once"):
            found = sequence(layout.model(**OVERLAP), calls)
        expected = sequence(layout.model(), calls)
        for step, gradients in enumerate(expected):
            what = f"step {step + 1} of {len(calls)}, of {calls[step]} calls: gradients"
            largest = max(largest, same(found[step], gradients, what))
    return largest


def no_sync_in_no_sync(layout: Layout = DP) -> float:
    """Make calls in a caller's no_sync(), each of which uses no_sync() itself."""
    layout.set_up()
    largest = 0.0
    model, plain = layout.model(**OVERLAP), layout.model()
    for step, calls in enumerate((1, 2, 2)):
        with fast_network(), the_defect(AssertionError):
            found = step_in_calls(model, step, calls, finishing="last", no_sync=True)
        expected = step_in_calls(plain, step, calls, finishing="last")
        largest = max(largest, same(found, expected, f"step {step + 1}, of {calls} calls: gradients"))
    ddp = layout.model(**OVERLAP).chunks[0]
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        held = not any(group.is_last_microbatch for group in ddp.bucket_groups)
        expect(held, "the exit of an inner no_sync() has ended the outer one")
    return largest


def layer_without_gradients(layout: Layout = DP) -> float:
    """Make a step in which the output of a layer is not used."""
    layout.set_up()
    model, plain = layout.model(**OVERLAP), layout.model()
    for trained in (model, plain):
        trained.train_step(0)
        layer = trained.chunks[0].module.decoder.layers[0]
        layer.forward = lambda hidden_states, *args, **kwargs: (hidden_states, None)
    plain.train_step(1)
    with the_defect(AssertionError):
        model.train_step(1)
    return same(model.parameters(), plain.parameters(), "parameters")


def prepared_and_stepped(layout: Layout = DP) -> float:
    """Call prepare_grads() before step(), as slime does; fp16 divides by the loss scale there."""
    layout.set_up()
    model, plain = layout.model(dtype="fp16"), layout.model(dtype="fp16")
    for trained in (model, plain):
        trained.zero_grad()
        trained.forward_backward()
    expect(not model.optimizer.prepare_grads(), "prepare_grads() has found an overflow")
    norm = model.optimizer.get_grad_norm()
    stepped, norm_of_step, _ = model.optimizer.step()
    expected = plain.optimizer.step()[1]
    expect(stepped, "step() has skipped the step")
    expect(norm_of_step == norm, f"step() has the gradient norm {norm_of_step}, and prepare_grads() {norm}")
    expect(abs(norm - expected) <= 1e-5 * expected, f"the gradient norm is {norm} instead of {expected}")
    return same(model.parameters(), plain.parameters(), "parameters")


def microbatch_without_tokens(layout: Layout = DP) -> float:
    """Train on a microbatch in which no token counts, beside one in which some do."""
    import torch

    layout.set_up()
    model = layout.model()
    empty = torch.zeros(2, model.seq + 1, dtype=torch.int64)
    full = model.microbatches(0, 1)
    model.zero_grad()
    model.forward_backward(microbatches=[*full, empty], masked=True)
    found = model.gradients()
    model.zero_grad()
    model.forward_backward(microbatches=full, masked=True)
    # The mean is over microbatches, of which the empty one is one.
    expected = {name: gradient / 2 for name, gradient in model.gradients().items()}
    return same(found, expected, "gradients")


def auxiliary_loss_of_two_context_parallel_ranks(layout: Layout = DP) -> None:
    """Differentiate a router's losses as one of two context-parallel ranks, which needs one rank only."""
    from importlib import import_module
    from unittest import mock

    import torch

    from ...patches.megatron._schedules import ROUTER, one_microbatch, weight_per_token

    schedules = import_module("megatron.core.pipeline_parallel.schedules")
    routers = import_module("megatron.core.transformer.moe.moe_utils")
    parallel = import_module("megatron.core.parallel_state")
    layout.set_up()
    attached = weight_per_token(unpatched(import_module(ROUTER).TopKRouter.apply_z_loss), torch)
    for per_token in (False, True):
        loss = torch.ones(1, requires_grad=True)
        output = routers.MoEAuxLossAutoScaler.apply(
            torch.zeros(1, requires_grad=True), loss * attached if per_token else loss
        )
        scale = 1.0 if per_token else one_microbatch(schedules, 1, cp_size=2).scale
        routers.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([scale]))
        config = SimpleNamespace(
            timers=None,
            grad_scale_func=None,
            deallocate_pipeline_outputs=None,
            num_moe_experts=2,
            calculate_per_token_loss=per_token,
        )
        before_0_16 = ["a model"] if "model_type" in inspect.signature(schedules.backward_step).parameters else []
        with mock.patch.object(parallel, "get_context_parallel_world_size", return_value=2):
            schedules.backward_step([None], [output], [None], *before_0_16, config)
        assert loss.grad is not None
        expect(loss.grad.item() == 2.0, f"a router's loss has the weight {loss.grad.item()} instead of 2")


def read_after_a_step(layout: Layout = DP) -> float:
    """Read sharded_state_dict() right after a step; state_dict(), which one rank may call alone, has to refuse."""
    layout.set_up()
    model, plain = layout.model(**BOTH), layout.model(**SHARDED, **OVERLAP)
    largest = 0.0
    for step in range(2):
        for trained in (model, plain):
            trained.train_step(step)
        largest = max(largest, same(_saved(model), _saved(plain), f"what is saved after step {step + 1}"))
    for trained in (model, plain):
        trained.train_step(2)
    try:
        model.chunks[0].state_dict()
    except MisuseError:
        pass
    else:
        raise DefectSeen("state_dict() returns parameters that are not gathered")
    # It changes nothing later on.
    model.gather_parameters()
    return max(largest, same(model.parameters(), plain.parameters(), "parameters"))


def _saved(model: Any) -> dict[str, Any]:
    import torch

    leaves = {key: getattr(leaf, "data", None) for key, leaf in model.chunks[0].sharded_state_dict().items()}
    return {
        key: data.detach().float().cpu().clone() for key, data in leaves.items() if isinstance(data, torch.Tensor)
    }


def hooks_switched_twice(layout: Layout = DP) -> float:
    """Switch forward pre-hooks off and on twice between steps, as around a checkpoint and a weight sync."""
    layout.set_up()
    model, plain = layout.model(**BOTH), layout.model(**SHARDED)
    for step in range(2):
        for trained in (model, plain):
            trained.train_step(step)
        (ddp,) = model.chunks
        for switch in (ddp.disable_forward_pre_hook, ddp.enable_forward_pre_hook):
            switch()
            with the_defect(KeyError, AssertionError):
                switch()
    model.gather_parameters()
    return same(model.parameters(), plain.parameters(), "parameters")


def gathers_of_whole_parameters(layout: Layout = DP) -> float | None:
    """Force gathers as a layer-wise optimizer has them: while another one is under way, and after a pass."""
    import torch

    layout.set_up()
    model = layout.model(**OVERLAP, overlap_param_gather=True)
    (chunk,) = model.chunks
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    gathered = []
    for bucket in (bucket for group in chunk.bucket_groups for bucket in group.buckets):
        if not hasattr(bucket, "set_layerwise_params_list"):
            return None  # up to 0.16
        smallest = min(bucket.params_list, key=lambda parameter: parameter.numel())
        # gloo, unlike NCCL, gathers as much from each rank: the same parameter, with other values
        whole = [smallest] if smallest.numel() * ranks <= bucket.grad_data.numel() else []
        bucket.set_layerwise_params_list([whole] * ranks)
        gathered += whole
    for parameter in gathered:
        parameter.data.fill_(rank)
    chunk.start_param_sync()
    chunk.start_param_sync(force_sync=True)
    from_others = max({*range(ranks)} - {rank}, default=rank)
    arrived = all(bool((parameter == from_others).all()) for parameter in gathered)
    expect(arrived, "a forced gather has lost what another one brought")
    model.config.finalize_model_grads_func = None
    with chunk.no_sync():
        model.forward_backward()
    gradients = model.gradients()
    chunk.start_param_sync(force_sync=True)
    return same(model.gradients(), gradients, "gradients after a forced gather")


CHECKS = (
    Check(
        "megatron.grad-ready-window",
        calls_in_varying_number,
        "gradients of steps of 1, 2, 3 and of 2, 1 calls, with a run without overlap",
        layouts=True,
    ),
    Check(
        "megatron.nested-no-sync",
        no_sync_in_no_sync,
        "gradients of steps of 1, 2, 2 calls in no_sync(), with a run without overlap",
        layouts=True,
    ),
    Check(
        "megatron.prepare-grads-once",
        prepared_and_stepped,
        "parameters after prepare_grads() and step(), with those after step()",
        layouts=True,
    ),
    Check(
        "megatron.parameters-without-gradients",
        layer_without_gradients,
        "parameters after a step in which a layer has no gradients, with a run without overlap",
    ),
    Check(
        "megatron.zero-tokens",
        microbatch_without_tokens,
        "gradients of a microbatch beside an empty one, with half of those of that one alone",
    ),
    Check("megatron.aux-loss-over-context-parallel", auxiliary_loss_of_two_context_parallel_ranks),
    Check(
        "megatron.gathered-when-read",
        read_after_a_step,
        "sharded_state_dict() after steps, with a run without overlap_param_gather",
        layouts=True,
    ),
    Check(
        "megatron.layer-wise-gathers",
        gathers_of_whole_parameters,
        "gradients after a forced gather, with those before it",
    ),
    Check(
        "megatron.forward-pre-hook",
        hooks_switched_twice,
        "parameters after hooks were switched twice, with a run without overlap",
        layouts=True,
    ),
)
