"""megatron.refit-plan-of-its-model: two pairs of models, refitted in one process, at 2 ranks."""

from __future__ import annotations

import importlib
from unittest import mock

import pytest
from rigs.diagnosed_code import made_up, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED
from rigs.megatron.save import minor

from megapatch.patches.megatron.refit_plan_of_its_model import KEY, MODULE, diagnose
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = pytest.mark.skipif(minor() < 16, reason="this Megatron has no refit (to 0.15)")
LAYERS = (2, 4, 2, 4)
"""Of the pairs, in the order of their refits; the first two are new, and the others have the same models again."""


def refits(rank, world_size):
    """The fraction of each target's elements that the refit left as they were, and the number of plans made."""
    refit = importlib.import_module(MODULE)
    unwrap = importlib.import_module("megatron.core.utils").unwrap_model
    init_parallel()
    pairs = {layers: [tiny_gpt(layers=layers).chunks for _ in range(2)] for layers in sorted(set(LAYERS))}
    planner = next(name for name in vars(refit) if name.startswith("build_") and name.endswith("_reshard_plan"))
    left = []
    with mock.patch.object(refit, planner, side_effect=getattr(refit, planner)) as plan:
        for layers in LAYERS:
            sources, (chunk,) = pairs[layers]
            source, target = unwrap(sources[0]), unwrap(chunk)
            for parameter in target.parameters():
                parameter.detach().fill_(7.0)
            refit.swap_model_weights(sources, target, refit.GlooCopyService())
            differ = [(a != b).sum() for a, b in zip(target.parameters(), source.parameters(), strict=True)]
            left.append(float(sum(differ)) / sum(one.numel() for one in source.parameters()))
    return left, plan.call_count


@pytest.mark.quick
def test_each_model_has_all_of_its_parameters():
    for left, plans in run_with_megatron(refits, 2, env=UNPATCHED):
        expected = [0, 0.46, 0, 0.46] if minor() > 16 else [0] * 4
        assert [round(part, 2) for part in left] == expected
        assert plans == (1 if minor() > 16 else 2)
    for left, plans in run_with_megatron(refits, 2):
        assert left == [0] * 4
        assert plans == 2


EXPERTS = {"experts": 2, "config": {"moe_ffn_hidden_size": 64}}
DIFFER = {  # by what differs, the options of two models
    "num_layers": ({}, {"layers": 4}),
    "hidden_size": ({}, {"hidden": 32}),
    "vocab_size": ({}, {"vocab": 64}),
    "tied embeddings": ({}, {"tied_embeddings": True}),
    "kv_channels": ({}, {"config": {"kv_channels": 4}}),
    "num_query_groups": ({}, {"config": {"num_query_groups": 1}}),
    "ffn_hidden_size": ({}, {"config": {"ffn_hidden_size": 32}}),
    "gated_linear_unit": ({}, {"config": {"gated_linear_unit": True}}),
    "add_bias_linear": ({}, {"config": {"add_bias_linear": False}}),
    "mtp_num_layers": ({}, {"config": {"mtp_num_layers": 1}}),
    "moe_ffn_hidden_size": (EXPERTS, {"experts": 2, "config": {"moe_ffn_hidden_size": 32}}),
    "nothing": ({}, {}),
}


def keys(rank, world_size):
    """By difference, how many sets of parameters two models have, and how many keys as source and as target."""
    make = getattr(importlib.import_module(MODULE), KEY)
    unwrap = importlib.import_module("megatron.core.utils").unwrap_model
    init_parallel()
    found = {}
    for name, options in DIFFER.items():
        cores = [unwrap(tiny_gpt(**each).chunks[0]) for each in options]
        parameters = [[(name, value.shape) for name, value in core.named_parameters()] for core in cores]
        keys_of = ([make(*pair, None) for pair in ((core, None), (None, core))] for core in cores)
        found[name] = [1 + (one != other) for one, other in (parameters, *zip(*keys_of, strict=True))]
    return found


@pytest.mark.skipif(minor() < 17, reason="0.16 keeps a plan with its model")
def test_models_whose_parameters_differ_have_plans_of_their_own():
    (found,) = run_with_megatron(keys, 1)
    assert found == {name: [1] * 3 if name == "nothing" else [2] * 3 for name in DIFFER}


def verdicts(rank, world_size):
    module = importlib.import_module(MODULE)

    def looks_at_layers(src_core, tgt_core, num_experts, group=None):
        return src_core.config.num_layers, num_experts

    def looks_at_models(src_core, tgt_core, num_experts, group=None):
        return id(src_core), num_experts

    return verdicts_of(diagnose, module, made_up(module, KEY, looks_at_layers, looks_at_models))


@pytest.mark.skipif(minor() < 17, reason="0.16 keeps a plan with its model")
def test_verdicts():
    expected = {
        "looks_at_layers": ("fixed", "configurations"),
        "looks_at_models": ("fixed", "tells models apart"),
    }
    assert_verdicts(of_a_rank(verdicts), expected)
