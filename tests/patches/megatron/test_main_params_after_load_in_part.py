"""megatron.main-params-after-load, 2 ranks, where a load changes one rank only, or lacks main parameters."""

import copy
import itertools
from functools import partial

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.main_params import (
    children,
    equal,
    mains,
    new_with,
    prepare,
    restore_weights,
    train,
    trained,
    weights,
)
from rigs.megatron.options import UNPATCHED, attempt

from megapatch._mcore.main_params import pairs, stale_pairs
from megapatch._verify.operations import Operations
from megapatch.testing import init_parallel

SHARDED = {"optimizer": "adam", "lr": 0.05, "use_distributed_optimizer": True}
CASES = {"bf16": {"dtype": "bf16", "lr": 0.05}, "bf16 distributed": {**SHARDED, "dtype": "bf16"}}
CHANGED = {"split": "word_embeddings.weight", "replicated": "input_layernorm.weight"}


def one_rank_loads_others(rank, options, kind):
    """Load weights of which only rank 0 has others than before, in a parameter that ranks split; then train on.

    Returns the main parameters of what all tensor-parallel ranks hold.
    """
    init_parallel(tp=2)
    model = trained(options, 0, 1)
    (state,) = weights(model)
    name = next(name for name in state if name.endswith(CHANGED[kind]))
    if rank == 0 or kind == "replicated":
        state[name][0] *= 2
    restore_weights(model, [state])
    train(model, 2, 3)
    all_pairs = itertools.chain.from_iterable(map(pairs, children(model)))
    return [
        main.detach() for parameter, _, main in all_pairs if not getattr(parameter, "tensor_model_parallel", 0)
    ]


def loaded_state_without_mains(options):
    """Load weights, and then optimizer state that has no main parameters, or lacks them: the weights count."""
    init_parallel()
    model = trained(options, 0, 1)
    saved = weights(model)
    train(model, 2, 3)
    state = copy.deepcopy(model.optimizer.state_dict())
    state.pop("fp32_from_fp16_params", None)
    restore_weights(model, saved)
    error, _ = attempt(model.optimizer.load_state_dict, state)
    prepare(model)
    return error, equal(mains(model), mains(new_with(options, saved)))


def waits_after_a_swap(options):
    """Load the weights that are there, and count how often the host waits before the next step."""
    init_parallel()
    model = trained(options, 0, 1)
    restore_weights(model, weights(model))
    with Operations() as operations:
        prepare(model)
    before = len(operations.waits)
    with Operations() as operations:
        prepare(model)
    return before - len(operations.waits)


def job(rank, world_size):
    for case, options in CASES.items():
        for kind in CHANGED:
            yield (case, kind), partial(one_rank_loads_others, rank, options, kind)
        yield (case, "without mains"), partial(loaded_state_without_mains, options)
        yield (case, "waits"), partial(waits_after_a_swap, options)


found = cells_of(job, 2)
unpatched = cells_of(job, 2, env=UNPATCHED)


@pytest.mark.parametrize("kind", CHANGED)
@pytest.mark.parametrize("case", CASES)
def test_replicas_stay_the_same(found, case, kind):
    first, second = (rank[case, kind] for rank in found)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


KINDS = {
    "tied": {"shared_embedding": True, "tensor_model_parallel": True},
    "experts": {"allreduce": False, "tensor_model_parallel": True},
    "replicated": {},
    "split": {"tensor_model_parallel": True},
}


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("tied", ["tied", "split"]),
        ("experts", ["experts"]),
        ("replicated", ["replicated", "split"]),
        ("split", ["split"]),
    ],
)
def test_a_parameter_is_judged_by_those_that_all_of_its_ranks_hold(changed, stale):
    def triple(kind):
        parameter = torch.zeros(2, dtype=torch.bfloat16)
        vars(parameter).update(KINDS[kind])
        return parameter, parameter, torch.full((2,), float(kind == changed))

    triples = {kind: triple(kind) for kind in KINDS}
    found = [parameter for parameter, *_ in stale_pairs(list(triples.values()))]
    assert [kind for kind, (parameter, *_) in triples.items() if any(parameter is one for one in found)] == stale


@pytest.mark.parametrize("case", CASES)
def test_optimizer_state_without_main_parameters_settles_nothing(found, unpatched, case):
    error = None if "distributed" in case else "KeyError"
    assert [rank[case, "without mains"] for rank in found] == [(error, True)] * 2
    assert [rank[case, "without mains"] for rank in unpatched] == [(error, False)] * 2


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_once(found, case):
    assert [rank[case, "waits"] for rank in found] == [1, 1]
