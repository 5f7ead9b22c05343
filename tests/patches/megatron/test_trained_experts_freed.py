"""megatron.trained-experts-freed: models with experts that were dropped, and what has to stay the same."""

from __future__ import annotations

import gc
import importlib
import weakref

import pytest
import torch
from rigs.diagnosed_code import GONE, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.imported import run_with_megatron
from rigs.megatron.process_groups import initialize, resources
from rigs.megatron.save import minor

from megapatch.patches.megatron.trained_experts_freed import ALL_TO_ALL, END, MODULE, diagnose
from megapatch.testing import destroy_parallel, tiny_gpt

if minor() < 13:
    pytest.skip("left as it is in 0.12: unsupported", allow_module_level=True)

CYCLES = 4
WITHOUT = {"MEGAPATCH_DISABLE": "megatron.trained-experts-freed"}  # groups of models that are gone are destroyed


def dropped(rank, world_size, dispatcher):
    """Losses, norms and weights of models of four layouts, how many of their objects live on, and the groups."""
    numbers, watched, groups = [], [], []
    for _ in range(CYCLES):
        initialize(expert_model_parallel_size=2)
        importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(1)
        model = tiny_gpt(
            experts=2,
            dtype="bf16",
            optimizer="adam",
            use_distributed_optimizer=True,
            config={"moe_token_dispatcher_type": dispatcher},
        )
        steps = [model.train_step(step) for step in range(2)]
        numbers.append(([(step.loss, step.grad_norm) for step in steps], model.parameters()))
        watched += map(weakref.ref, (*model.chunks, model.optimizer, *model.chunks[0].parameters()))
        del model
        gc.collect()
        groups.append(resources()[0])
        destroy_parallel()
    return numbers, sum(one() is not None for one in watched), groups


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.quick
def test_models_that_were_dropped_are_freed_and_train_as_before(dispatcher):
    plain, patched = (run_with_megatron(dropped, 2, dispatcher, env=env) for env in (WITHOUT, None))
    for (numbers, alive, groups), (numbers_now, alive_now, groups_now) in zip(plain, patched, strict=True):
        for (steps, weights), (steps_now, weights_now) in zip(numbers, numbers_now, strict=True):
            assert steps_now == steps
            assert all(torch.equal(weights_now[name], weights[name]) for name in weights)
        assert alive > 0 and groups == sorted({*groups})  # those of each layout stay
        assert alive_now == 0 and len({*groups_now}) == 1


def verdicts(rank, world_size):
    module = importlib.import_module(MODULE)

    def resets(self, hidden_states):
        self.probs = None

    def keeps_nothing(self, hidden_states, routing_map, probs): ...

    kind = getattr(module, ALL_TO_ALL)
    edits = {
        "resets": (kind, END, resets),
        "no probs": (kind, "dispatch_preprocess", keeps_nothing),
        "gone": (kind, END, GONE),
    }
    return verdicts_of(diagnose, module, edits)


def test_verdicts():
    expected = {
        "as it is": ("needed", "keeps probs"),
        "resets": ("fixed", "resets probs"),
        "no probs": ("fixed", "keeps no probs"),
        "gone": ("unknown", END),
    }
    assert_verdicts(of_a_rank(verdicts), expected)
