"""megatron.main-params-after-load, 2 ranks: loads of one rank, without main parameters, or while gathers wait.

Gathers end late: what nobody has waited for is written when somebody does, over whatever was loaded meanwhile.
"""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rigs.cells import cells_of
from rigs.late_collectives import make_collectives_late
from rigs.log import Log
from rigs.megatron.gathers import pair, unwrapped, wrong
from rigs.megatron.main_params import (
    children,
    prepare,
    restore_weights,
    train,
    trained,
    weights,
)
from rigs.megatron.options import UNPATCHED, assert_misuse, attempt

from megapatch._mcore.main_param_pairs import pairs, stale_pairs
from megapatch._verify.operations import Operations
from megapatch.patches.megatron import _weights_alone
from megapatch.patches.megatron._weights_alone import agree
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
        yield (case, "waits"), partial(waits_after_a_swap, options)


found = cells_of(job, 2)


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


class Load(SimpleNamespace):
    __hash__ = object.__hash__

    def is_restore(self):
        return self.restores


RESTORE, LEND = Load(line="restores.py:1", restores=True), Load(line="lends.py:1", restores=False)
LEND_THERE = Load(line="restores.py:1", restores=False)


FINER = 2 + 2**-10


def half(*values):
    return torch.tensor(values, dtype=torch.bfloat16)


class Optimizer(SimpleNamespace):
    """As Float16OptimizerWithFloat16Params: parameters whose weights are 1, with main parameters of 2.

    The second copy that it steps rounds to its main parameter, as of a precision-aware optimizer.
    """

    def __init__(self, *loads, copies=0):
        self.parameters = [half(1) for _ in loads]
        self.mains = [half(2) for _ in loads]
        self.copies = [torch.full((1,), value) for value in (3.0, FINER)[:copies]]
        super().__init__(
            float16_groups=[self.parameters],
            fp32_from_float16_groups=[self.mains],
            shard_float16_groups=[],
            model_float16_groups=[self.parameters],
            model_fp32_groups=[],
            optimizer=SimpleNamespace(param_to_inner_param=dict(zip(self.mains, self.copies, strict=False))),
        )
        self.loads = {id(parameter): load for parameter, load in zip(self.parameters, loads, strict=True)}

    def held(self):
        return [each.item() for each in (*self.mains, *self.copies)]


@pytest.mark.parametrize(
    ("loads", "copies", "expected", "said"),
    [
        ((RESTORE,), 0, [1], ["restores"]),
        ((RESTORE, None), 0, [1, 2], ["restores"]),
        ((RESTORE, LEND), 0, [1, 2], ["restores", "lends"]),
        ((LEND, None), 0, [2, 2], ["lends"]),
        ((RESTORE, LEND_THERE), 0, [1, 2], ["restores", "restores"]),
        ((None, None), 2, [2, 2, 3, FINER], []),
        ((RESTORE, None), 2, [1, 2, 1, FINER], ["restores"]),
        ((None, RESTORE), 2, [2, 1, 2, 1], ["restores"]),
        ((LEND, None), 2, [2, 2, 3, FINER], ["lends"]),
    ],
)
def test_main_parameters_and_copies_follow_what_restores_and_nothing_else(loads, copies, expected, said):
    optimizer, other = Optimizer(*loads, copies=copies), Optimizer(None, copies=1)
    both = {**optimizer.loads, **other.loads}
    _weights_alone._said.clear()
    with Log() as log:
        for _ in range(2):
            assert agree([optimizer, other], lambda parameter, optimizer: both[id(parameter)]) is True
            assert (optimizer.held(), other.held()) == (expected, [2, 3])
    assert [text.partition(".py:1")[0].rpartition(" ")[2] for text in log.texts] == said  # once a line


def test_copies_of_an_optimizer_that_has_fp32_alone_follow_as_well():
    half_alone, fp32_alone = Optimizer(RESTORE), Optimizer(copies=1)
    loaded, copy = torch.ones(1), torch.full((1,), 3.0)
    fp32_alone.model_fp32_groups = [[loaded]]
    fp32_alone.optimizer.param_to_inner_param[loaded] = copy
    fp32_alone.loads[id(loaded)] = RESTORE
    assert agree([half_alone, fp32_alone], lambda parameter, optimizer: optimizer.loads[id(parameter)])
    assert copy.item() == 1


@pytest.mark.parametrize("offloaded", ["parameters", "mains"])
def test_weights_that_a_framework_has_offloaded_are_not_compared(offloaded):
    optimizer = Optimizer(RESTORE)
    getattr(optimizer, offloaded)[0].untyped_storage().resize_(0)
    assert agree([optimizer], lambda parameter, optimizer: RESTORE) is False


class Quantized(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("data", "held", "expected"),
    [
        (half(1, 2, 3), torch.tensor([5.0]), [5.0]),
        (half(1, 2, 3), torch.tensor([5.0], dtype=torch.float16), None),
        (half(1, 2, 3), torch.tensor([5], dtype=torch.int32), None),
        (half(1, 2, 3), None, None),
        (half(1, 2, 3).as_subclass(Quantized), torch.tensor([5.0]), "left out"),
    ],
    ids=["fp32", "fp16", "int32", "none yet", "quantized"],
)
def test_main_parameters_of_a_precision_aware_optimizer_are_those_in_fp32(data, held, expected):
    parameter, shard = SimpleNamespace(data=data), half(2)
    optimizer = SimpleNamespace(
        model_float16_groups=[[parameter]],
        shard_float16_groups=[[shard]],
        shard_fp32_from_float16_groups=[[None]],
        optimizer=SimpleNamespace(state={} if held is None else {shard: {"master_param": held}}),
        _get_model_param_range_map=lambda parameter: {"param": SimpleNamespace(start=1, end=2)},
    )
    if expected == "left out":
        assert list(pairs(optimizer)) == []
        return
    ((found, part, main),) = pairs(optimizer)
    assert found is parameter and part.tolist() == [2.0]
    assert main is None if expected is None else main.tolist() == expected


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_once(found, case):
    assert [rank[case, "waits"] for rank in found] == [1, 1]


WRAPPED = {"wrapped": lambda ddp: ddp, "unwrapped": unwrapped}


def gone_back(under_way, of):
    """Load the weights of before a step whose gathers are under way, or were not begun.

    Returns what the next forward pass has of them: the fraction that is wrong; and what a read before it says.
    """
    init_parallel()
    _, model = pair()
    (ddp,) = model.chunks
    before = model.parameters()
    target = of(ddp)
    saved = {
        name: value.clone() if hasattr(value, "clone") else value for name, value in target.state_dict().items()
    }
    model.train_step()
    if under_way:
        ddp.start_param_sync()
    target.load_state_dict(saved, strict=False)
    read = attempt(ddp.state_dict)
    model.forward_backward(1, forward_only=True)
    return wrong(model.parameters(), before), read


def gone_back_in_part():
    """Load one parameter only: the others of its bucket group are still to be gathered."""
    _, model = pair()
    (ddp,) = model.chunks
    name, value = next((name, value) for name, value in ddp.state_dict().items() if torch.is_tensor(value))
    value = value.clone()
    model.train_step()
    ddp.load_state_dict({name: value}, strict=False)
    return attempt(ddp.state_dict)


def gathering(rank, world_size):
    for name, of in WRAPPED.items():
        for under_way in (False, True):
            yield (name, under_way), partial(gone_back, under_way, of)
    yield "in part", gone_back_in_part


gathering_ranks = cells_of(gathering, 2, setup=make_collectives_late)


gathering_without = cells_of(gathering, 2, setup=make_collectives_late, env=UNPATCHED)


@pytest.mark.parametrize("name", WRAPPED)
def test_without_the_patch_a_gather_under_way_writes_over_what_is_loaded(gathering_without, name):
    assert all(found[name, True][0] > 0.4 for found in gathering_without)


@pytest.mark.parametrize("under_way", [False, True], ids=["not begun", "under way"])
@pytest.mark.parametrize("name", WRAPPED)
def test_what_is_loaded_stays_and_can_be_read(gathering_ranks, name, under_way):
    for found in gathering_ranks:
        differing, (error, _) = found[name, under_way]
        assert (differing, error) == (0.0, None)


def test_what_was_not_loaded_is_still_to_be_gathered(gathering_ranks):
    for found in gathering_ranks:
        assert_misuse(found["in part"], "not gathered yet")
