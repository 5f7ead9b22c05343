"""skyrl.adapters-own-state: two adapters in turns by SkyRL's own store, compared with each trained by itself.

Real: the store, Megatron's DDP and distributed optimizer. A whole tiny GPT takes the place of a LoRA adapter.
"""

import importlib
from unittest import mock

import pytest
import torch
from rigs.cells import run_cells
from rigs.megatron.gathers import wrong
from rigs.skyrl.releases import RELEASES, find_skyrl, needs_skyrl

from megapatch import apply, restore
from megapatch.patches.skyrl.adapters_own_state import MODULE
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = needs_skyrl

STEPS = 3
ADAPTERS = {"a": 0, "b": 1}  # with the seeds of their data
OPTIMIZER = {"optimizer": "adam", "lr": 0.05, "use_distributed_optimizer": True}


def built(dtype):
    """Return a model whose optimizer has its state, as SkyRL makes it before it registers adapters."""
    model = tiny_gpt(dtype=dtype, layers=1, **OPTIMIZER)
    for each in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
        if hasattr(each, "_init_optimizer_states_with_dummy_values"):
            each._init_optimizer_states_with_dummy_values()
        else:
            each.init_state_fn(each.optimizer, each.config)
    return model


def by_themselves(dtype):
    found = {}
    for name, seed in ADAPTERS.items():
        model = built(dtype)
        for step in range(STEPS):
            model.train_step(step, seed=seed)
        found[name] = model.parameters()
    return found


def in_turns(dtype):
    module, model = importlib.import_module(MODULE), built(dtype)
    store, found = module.AdapterStore(), {}
    with (
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *ignored: tensor),
        mock.patch.object(module, "_expected_lora_param_check"),  # it is a whole model
        mock.patch.object(torch.cuda, "current_stream", mock.Mock(), create=True),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        store.register_pristine(model.chunks, model.optimizer, "signature")
        for name in ADAPTERS:
            store.create(name, model.chunks, model.optimizer, "signature")
        for step in range(STEPS):
            for name, seed in ADAPTERS.items():
                store.swap_to(name, model.chunks, model.optimizer)
                model.train_step(step, seed=seed)
                found[name] = {key: value.clone() for key, value in model.parameters().items()}
    return found


def differing(dtype):
    """Return the fraction of the elements that differ, by adapter."""
    alone, turns = by_themselves(dtype), in_turns(dtype)
    return {name: wrong(turns[name], alone[name]) for name in ADAPTERS}


def job(rank, world_size):
    init_parallel()
    importlib.import_module(MODULE)
    restore()
    yield "fp32, without", lambda: differing("fp32")
    apply()
    for dtype in ("fp32", "bf16"):
        yield dtype, lambda dtype=dtype: differing(dtype)


@pytest.fixture(
    scope="module",
    params=[one for one in RELEASES if one.has("workers/megatron/adapter_store")],
    ids=lambda release: release.name,
)
def ranks(request):
    return run_cells(job, 2, setup=find_skyrl, env={"SKYRL_RELEASE": request.param.folder})


def test_without_the_patch_fp32_adapters_have_each_others_moments(ranks):
    for found in ranks:
        assert all(fraction > 0.5 for fraction in found["fp32, without"].values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_in_turns_are_those_trained_by_themselves(ranks, dtype):
    for found in ranks:
        assert found[dtype] == {"a": 0.0, "b": 0.0}
