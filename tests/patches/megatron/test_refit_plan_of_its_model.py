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
        assert left == pytest.approx(expected, abs=0.01)
        assert plans == (1 if minor() > 16 else 2)
    for left, plans in run_with_megatron(refits, 2):
        assert left == [0] * 4
        assert plans == 2


def verdicts(rank, world_size):
    module = importlib.import_module(MODULE)
    if minor() == 16:
        return verdicts_of(diagnose, module, {})

    def looks_at_layers(src_core, tgt_core, num_experts, group=None):
        return src_core.config.num_layers, num_experts

    def looks_at_models(src_core, tgt_core, num_experts, group=None):
        return id(src_core), num_experts

    return verdicts_of(diagnose, module, made_up(module, KEY, looks_at_layers, looks_at_models))


def test_verdicts():
    known = {
        "as it is": ("needed", "for all models"),
        "looks_at_layers": ("fixed", "configurations"),
        "looks_at_models": ("fixed", "tells models apart"),
    }
    older = {"as it is": ("absent", "it came with megatron-core 0.17")}
    assert_verdicts(of_a_rank(verdicts), known if minor() > 16 else older)
