"""megatron.aux-loss-over-context-parallel: two ranks that share sequences, compared with two that have whole ones.

Attention is left out: on CPU it takes whole sequences.
"""

import functools
import importlib
import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.options import UNPATCHED
from rigs.megatron.save import minor
from rigs.train_step.layouts import PER_TOKEN, SEQUENCE
from rigs.train_step.models import allow_sequence_parallel

from megapatch.patch import NEEDED
from megapatch.patches.megatron import aux_loss_over_context_parallel as patch
from megapatch.testing import init_parallel, tiny_gpt

COEFFICIENT = 0.1
LOSSES = {
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEFFICIENT},
    "z_loss": {"moe_z_loss_coeff": COEFFICIENT},
}
ROUTER = "router.weight"
OF_TOKENS = [f"{name}, {size}" for name in LOSSES for size in ("cp", "tp")]


def own_gradients(config, dtype, shared=None, **options):
    """The gradients of the routers that are those of MoE's own losses: with a coefficient, less without."""
    found = []
    for used in (config, {}):
        used = {**used, **(shared or {})}
        model = tiny_gpt(experts=2, attention=False, dtype=dtype, config=used, **options)
        model.zero_grad()
        model.forward_backward(microbatches=same_on_all_ranks(model))
        scale = float(model.optimizer.get_loss_scale())
        found.append({name: value / scale for name, value in model.gradients().items() if name.endswith(ROUTER)})
    with_losses, without = found
    assert with_losses
    return {name: value - without[name] for name, value in with_losses.items()}


def same_on_all_ranks(model):
    """Two microbatches of one sample: sequences of one sample are chunks of the same order with all layouts."""
    random = torch.Generator().manual_seed(3)
    return [torch.randint(model.vocab, (1, model.seq + 1), generator=random) for _ in range(2)]


def ratios(expected, config, dtype="fp32", **options):
    """How large the gradients with context parallel are, compared with those without; and which way they point."""
    found = own_gradients(config, dtype, **options)
    answer = []
    for name, value in expected.items():
        ratio = (found[name].norm() / value.norm()).item()
        direction = (found[name] * value).sum() / found[name].norm() / value.norm()
        answer.append((ratio, direction.item()))
    return answer


def job(rank, world_size):
    init_parallel()
    expected = {name: own_gradients(config, "fp32") for name, config in LOSSES.items()}
    yield "data parallel", functools.partial(ratios, expected["aux_loss"], LOSSES["aux_loss"])
    init_parallel(cp=2)
    for name, config in LOSSES.items():
        yield name, functools.partial(ratios, expected[name], config)
    yield "fp16", functools.partial(ratios, expected["aux_loss"], LOSSES["aux_loss"], "fp16")
    yield "scale", held_scale
    yield "scales, cp", scales_of_older_releases
    yield "no scale", without_a_scale
    init_parallel()
    per_token = {name: own_gradients(config, "fp32", **PER_TOKEN) for name, config in LOSSES.items()}
    init_parallel(cp=2)
    for name, config in LOSSES.items():
        yield f"{name}, cp", functools.partial(ratios, per_token[name], config, **PER_TOKEN)
    init_parallel(tp=2)  # its ranks draw other weights than one
    allow_sequence_parallel()
    yield "scales, tp", scales_of_older_releases
    for name, config in LOSSES.items():
        expected[name] = own_gradients(config, "fp32", shared=SEQUENCE["config"])
        yield (
            f"{name}, tp",
            functools.partial(ratios, expected[name], config, shared=SEQUENCE["config"], **PER_TOKEN),
        )


def held_scale():
    """The scale that the last schedule has left behind."""
    routers = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    return routers.MoEAuxLossAutoScaler.main_loss_backward_scale.item()


def scales_of_older_releases():
    """The scales of a loss per microbatch and of one per token, from 3 on, where both repairs are needed."""
    routers = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    found, needed = [], SimpleNamespace(kind=NEEDED)

    def backward_step(config):
        found.append(routers.MoEAuxLossAutoScaler.main_loss_backward_scale)

    diagnoses = {name: lambda _: needed for name in ("diagnose_microbatches", "diagnose_tokens")}
    with mock.patch.multiple(patch, **diagnoses):
        patched_backward_step = patch.scale_by_ranks(backward_step)
    with mock.patch.object(routers.MoEAuxLossAutoScaler, "main_loss_backward_scale", 3.0):
        for per_token in (False, True):
            config = SimpleNamespace(num_moe_experts=2, calculate_per_token_loss=per_token)
            patched_backward_step(config=config)
    return found


def without_a_scale():
    """Differentiate before any schedule has set the scale, as Megatron begins; return the gradient."""
    routers = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    backward_step = importlib.import_module("megatron.core.pipeline_parallel.schedules").backward_step
    config = SimpleNamespace(num_moe_experts=2, calculate_per_token_loss=minor() > 15, timers=None)
    config.grad_scale_func, config.deallocate_pipeline_outputs = None, False
    loss = torch.ones(1, requires_grad=True)
    given = dict.fromkeys(inspect.signature(backward_step).parameters) | {"output_tensor": loss * 3}
    with mock.patch.object(routers.MoEAuxLossAutoScaler, "main_loss_backward_scale", None):
        backward_step(**given | {"config": config})
    return loss.grad.item()


unpatched = cells_of(job, 2, env=UNPATCHED)
patched = cells_of(job, 2)


def assert_all(ratios, expected, rel=1e-4):
    assert ratios
    for ratio, direction in ratios:
        assert ratio == pytest.approx(expected, rel=rel)
        assert direction == pytest.approx(1.0, abs=rel)


@pytest.mark.skipif(minor() > 15, reason="repaired in 0.16")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.quick
def test_without_the_patch_two_ranks_halve_the_losses(unpatched, name):
    for found in unpatched:
        assert_all(found[name], 0.5)
        assert_all(found["data parallel"], 1.0)


@pytest.mark.parametrize("name", ["data parallel", *LOSSES])
@pytest.mark.quick
def test_losses_weigh_as_much_as_without_context_parallel(patched, name):
    for found in patched:
        assert_all(found[name], 1.0)


def test_a_scale_that_nothing_has_set_stays_so(patched):
    assert [found["no scale"] for found in patched] == [3.0, 3.0]


def test_each_loss_counts_the_ranks_that_its_release_leaves_out(patched):
    for found in patched:
        assert (found["scales, cp"], found["scales, tp"]) == ([6.0, 6.0], [3.0, 6.0])


def test_with_a_loss_scale(patched):
    for found in patched:
        assert_all(found["fp16"], 1.0, rel=5e-3)  # of 11 bits: 1.3e-3 is seen


@pytest.mark.skipif(minor() > 15, reason="repaired in 0.16")
def test_the_scale_that_the_schedule_has_set_stays(unpatched, patched):
    assert [found["scale"] for found in patched] == [found["scale"] for found in unpatched]


@pytest.mark.skipif(minor() > 18, reason="repaired in 0.19")
@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.quick
def test_without_the_patch_two_ranks_halve_losses_per_token(unpatched, name):
    for found in unpatched:
        assert_all(found[name], 0.5)


@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.quick
def test_losses_per_token_weigh_as_much_on_one_rank_as_on_two(patched, name):
    for found in patched:
        assert_all(found[name], 1.0)
