"""megatron.models-are-freed: what is left of models that a program has dropped, at 2 ranks."""

from __future__ import annotations

import copy
import gc
import importlib
import inspect
import pickle
import weakref
from functools import partial

import pytest
import torch
from rigs.cells import cells_of
from rigs.diagnosed_code import GONE, made_up, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.options import BOTH

from megapatch._mcore.process_groups import process_groups
from megapatch.patches.megatron.models_are_freed import PATCH, WRAPPED_BY, diagnose_hooks
from megapatch.testing import tiny_gpt

SHARDED = {"optimizer": "adam", "use_distributed_optimizer": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {
    "dense": {},
    "fp32, distributed optimizer": SHARDED,
    "bf16, distributed optimizer, both": {**SHARDED, **BOTH, "dtype": "bf16"},
    "experts": {"experts": 2},
    "experts, recomputed": {"experts": 2, "config": RECOMPUTED},
    "experts, allgather": {"experts": 2, "config": {"moe_token_dispatcher_type": "allgather"}},
}
MORE = {"experts": 10}
"""The numbers of layouts, where it is not 4."""


def rotary():
    kind = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding").RotaryEmbedding
    group = importlib.import_module("megatron.core.parallel_state").get_context_parallel_group()
    takes_group = "cp_group" in inspect.signature(kind.__init__).parameters
    return kind(8, 1.0, **({"cp_group": group} if takes_group else {}))


def cycles(options, count):
    """By layout: process groups, objects and bytes that models of the layouts before have left; and the losses."""
    state = importlib.import_module("megatron.core.parallel_state")
    seed = importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed
    dropped, found, losses = [], [], []
    for _ in range(count):
        gc.collect()
        there = [each for each in (reference() for reference in dropped) if each is not None]
        held = sum(each.nbytes for each in there if isinstance(each, torch.Tensor))
        state.initialize_model_parallel()
        found.append((len(process_groups()), len(there), held))
        del there
        seed(1)
        model, table = tiny_gpt(**options), rotary()
        losses += [model.train_step(step).loss for step in range(2)]
        table(8)
        parts = (*model.chunks, model.optimizer, table, *model.chunks[0].parameters())
        dropped += map(weakref.ref, (*parts, *(buffer.grad_data for buffer in model.chunks[0].buffers)))
        del model, table, parts
        torch.distributed.barrier()  # Megatron destroys gloo groups at once, which a rank may still connect
        state.destroy_model_parallel()
    return found, losses


def tables():
    """What rotary tables of two modules are, and how often they were computed."""
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
    one, other = rotary(), rotary()
    forward = type(one).forward
    forward.cache_clear()
    first = one(8)
    found = {
        "cached": one(8) is first and one.forward(8) is first,
        "of each module": other(8) is not first and torch.equal(other(8), first),
        "of each length": one(4) is not one(8),
        "misses": forward.cache_info().misses,
        "size": forward.cache_info().maxsize,
    }
    one.forward.cache_clear()  # as YarnRotaryEmbedding does
    return {**found, "cleared": forward.cache_info().currsize == 0 and one(8) is not first}


def module_alone(alone):
    """The gradients of a module, if it alone refers to what wraps it or not; and if its copies are without."""
    importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(1)
    model = tiny_gpt()
    (chunk,) = model.chunks
    module, main_grads = chunk.module, [parameter.main_grad for parameter in chunk.parameters()]
    chunk.zero_grad_buffer()
    kept = [] if alone else [model, chunk]
    del model, chunk
    gc.collect()
    tokens = torch.arange(8).reshape(1, 8).cuda()
    module(tokens, tokens, None, labels=tokens).sum().backward()
    copied = (
        pickle.loads(pickle.dumps(vars(module).get(WRAPPED_BY, []))),
        copy.deepcopy(vars(module).get(WRAPPED_BY)),
    )
    del kept
    return [grad.clone() for grad in main_grads], not any(copied)


def job(rank, world_size, count=None):
    for case, options in CASES.items():
        yield case, partial(cycles, options, count or MORE.get(case, 4))
    yield "tables", tables
    for alone in (False, True):
        yield f"module alone: {alone}", partial(module_alone, alone)


without = cells_of(partial(job, count=3), 2, env={"MEGAPATCH_DISABLE": PATCH.name})
ranks = cells_of(job, 2)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick
def test_nothing_is_left(ranks, case):
    for found in ranks:
        of_layouts, _ = found[case]
        assert of_layouts == [(of_layouts[0][0], 0, 0)] * MORE.get(case, 4)


@pytest.mark.parametrize("case", CASES)
def test_without_the_patch_models_stay_and_numbers_are_the_same(without, ranks, case):
    for before, after in zip(without, ranks, strict=True):
        left, losses = before[case]
        assert [objects for _, objects, _ in left] == [0, left[1][1], 2 * left[1][1]]
        assert (left[1][1] == 1) == (case == "dense")  # the rotary embedding
        assert after[case][1][: len(losses)] == losses


def test_a_module_keeps_what_wraps_it(without, ranks):
    for before, after in zip(without, ranks, strict=True):
        (expected, _), (found, clean) = before["module alone: False"], after["module alone: True"]
        assert any(grad.any() for grad in expected) and clean
        assert all(map(torch.equal, found, expected))


def test_rotary_tables_are_cached_as_before(without, ranks):
    for before, after in zip(without, ranks, strict=True):
        assert before["tables"] == after["tables"]
        assert after["tables"] == {
            **dict.fromkeys(("cached", "of each module", "of each length", "cleared"), True),
            "misses": 3,
            "size": 32,
        }


def verdicts(rank, world_size):
    module = importlib.import_module(PATCH.sites[0].module)
    ddp = module.DistributedDataParallel

    def keeps_nothing(self, param):
        return lambda *unused: None

    def no_hook(self, param): ...

    changes = made_up(ddp, "_make_backward_post_hook", keeps_nothing, no_hook)
    changes["gone"] = (ddp, "_make_backward_post_hook", GONE)
    found = verdicts_of(diagnose_hooks, module, changes)
    for site in PATCH.sites[1:]:
        module = importlib.import_module(site.module)
        (path,) = site.replace
        kind, name = getattr(module, path.partition(".")[0]), path.partition(".")[0]
        plain = inspect.unwrap(kind.forward)
        changes = {"not cached": (kind, "forward", plain), "gone": (module, name, GONE)}
        found |= {f"{name}, {case}": it for case, it in verdicts_of(site.diagnose, module, changes).items()}
    return found


def test_verdicts():
    expected = {
        "as it is": ("needed", "autograd's graph keep their model"),
        "keeps_nothing": ("fixed", "do not keep"),
        "no_hook": ("unknown", "to return a hook"),
        "gone": ("unknown", "_make_backward_post_hook"),
    }
    for name in ("RotaryEmbedding", "YarnRotaryEmbedding"):
        expected[f"{name}, as it is"] = ("needed", "keeps each module")
        expected[f"{name}, not cached"] = ("fixed", "is not cached for the class")
        expected[f"{name}, gone"] = ("unknown", f"{name}.forward")
    assert_verdicts(of_a_rank(verdicts), expected)
