"""skyrl.grad-scale: SkyRL's own wrapper around a real model and optimizer, at 2 ranks, for each release."""

import importlib

import pytest
import torch
from rigs.cells import AUDITED, take_rules
from rigs.megatron.options import assert_same_parameters
from rigs.skyrl.releases import has_correctness_fixes, needs_skyrl

from megapatch import apply, restore
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = needs_skyrl

SCALE = 1024.0  # a power of two: scaling and unscaling are exact
SCALED = {"optim": {"loss_scale": SCALE}}
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
MODELS = {"dense": {}, "experts": {"experts": 2, "config": AUXILIARY}}


def trained(release, options):
    """Gradient norm, the parameters after a step of SGD, and the config's function."""
    model = tiny_gpt(dtype="bf16", hooks=False, **options, **SCALED)
    wrapper = release.wrapped(model.chunks, model.optimizer)
    if hasattr(wrapper, "run_pending_grad_sync"):  # from 0.4.0 on reduces are left to the step, and to Bridge
        model.config.finalize_model_grads_func = finalize_model_grads()
    return model.train_step().grad_norm, model.parameters()


def finalize_model_grads():
    return importlib.import_module("megatron.core.distributed").finalize_model_grads


def found_by(rank, world_size, release):
    init_parallel()
    found = {}
    for name, options in MODELS.items():
        plain = tiny_gpt(dtype="bf16", **options)
        found["plain", name] = plain.train_step().grad_norm, plain.parameters()
    without_auxiliary = tiny_gpt(dtype="bf16", experts=2)
    found["without auxiliary loss"] = without_auxiliary.train_step().grad_norm

    restore()
    take_rules()
    for name, options in MODELS.items():
        found["without", name] = trained(release, options)
    found["rules without"] = take_rules()
    apply()
    for name, options in MODELS.items():
        found["with", name] = trained(release, options)
    found["rules with"] = take_rules()

    model = tiny_gpt(dtype="bf16", hooks=False, **SCALED)
    release.wrapped(model.chunks)
    found["no optimizer"] = model.config.grad_scale_func
    model.config.grad_scale_func = torch.neg
    release.wrapped(model.chunks, model.optimizer)
    found["the user's own"] = model.config.grad_scale_func is torch.neg
    return found


@pytest.fixture(scope="module")
def ranks(release):
    return release.ranks(found_by, 2, release, env=AUDITED)


def test_the_audit_finds_a_loss_that_is_not_scaled(release, ranks):
    for found in ranks:
        assert set(found["rules without"]) == (set() if has_correctness_fixes(release) else {"scaled-once"})
        assert found["rules with"] == []


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_run_without_a_loss_scale(release, ranks, name):
    for found in ranks:
        norm, parameters = found["plain", name]
        scaled_norm, scaled_parameters = found["with", name]
        assert scaled_norm == pytest.approx(norm, rel=1e-6)
        assert_same_parameters(scaled_parameters, parameters)
        defective_norm, _ = found["without", name]
        assert defective_norm == pytest.approx(norm if has_correctness_fixes(release) else norm / SCALE, rel=1e-6)


def test_the_auxiliary_loss_counts(ranks):
    """Else the test above would say nothing about it."""
    for found in ranks:
        assert found["plain", "experts"][0] != pytest.approx(found["without auxiliary loss"], rel=1e-2)


def test_nothing_is_set_without_an_optimizer_or_where_the_user_has_set_something(release, ranks):
    for found in ranks:
        assert found["no optimizer"] is None
        assert found["the user's own"] is not has_correctness_fixes(
            release
        )  # later releases set theirs in any case
