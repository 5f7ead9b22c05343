"""MegatronLoop drives the real train(): the same numbers as by hand, faults where asked."""

from __future__ import annotations

import traceback

import pytest
import torch
from rigs.megatron.options import BOTH, UNPATCHED, needs_training

from megapatch.testing import Fault, MegatronLoop, init_parallel, run_ranks, tiny_gpt

pytestmark = needs_training
CASES = [
    ("plain", {}, {}, "disabled"),
    ("plain, validated", {}, {}, "validate_results"),
    ("overlap", {}, {"overlap_grad_reduce": True}, "disabled"),
    ("distopt overlap", {}, BOTH, "disabled"),
    ("bf16 distopt overlap, validated", {}, {**BOTH, "dtype": "bf16"}, "validate_results"),
    ("fp16", {}, {"dtype": "fp16"}, "disabled"),
    ("pp2 vpp2 distopt overlap", {"pp": 2, "vpp": 2}, {**BOTH, "align_param_gather": True}, "disabled"),
    ("tp2, validated", {"tp": 2}, {}, "validate_results"),
    ("moe ep2", {"ep": 2}, {"experts": 4}, "disabled"),
]


def by_hand_and_with_train(rank, world_size):
    return [compare(*case) for _, *case in CASES]


def compare(layout, options, rerun_mode):
    init_parallel(**layout)
    count = 4 if {"tp", "pp"} & set(layout) else 2
    by_hand = tiny_gpt(layers=4, **options)
    expected = [by_hand.train_step(step, num_microbatches=count).loss for step in range(3)]

    by_hand.gather_parameters()

    init_parallel(**layout)
    model = tiny_gpt(layers=4, hooks=False, **options)
    loop = MegatronLoop(model, num_microbatches=count, rerun_mode=rerun_mode)
    losses = loop.train(3)
    assert loop.iteration == loop.args.iteration + 3 == 3
    return expected, losses, by_hand.parameters(), model.parameters()


@pytest.fixture(scope="module")
def trained():
    by_rank = run_ranks(by_hand_and_with_train, 2, env=UNPATCHED)
    return {name: [results[index] for results in by_rank] for index, (name, *_) in enumerate(CASES)}


@pytest.mark.parametrize("case", [name for name, *_ in CASES])
def test_one_call_is_the_same_steps_by_hand(trained, case):
    for expected, losses, by_hand, parameters in trained[case]:
        assert losses == pytest.approx(expected, abs=1e-5)
        assert parameters.keys() == by_hand.keys()
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, by_hand[name], rtol=0, atol=1e-5)


def failure(loop, fault):
    try:
        loop.train(2, fault=fault)
    except Exception:
        return traceback.format_exc()
    return ""


def interrupt_everywhere(rank, world_size):
    raised = {}
    for place in ("data", "loss", "backward"):
        init_parallel()
        loop = MegatronLoop(tiny_gpt(hooks=False))
        raised[place] = failure(loop, fault=Fault(ConnectionError(place), microbatch=3, place=place))
        assert loop.iteration == 0
        assert loop.args.curr_iteration == 1  # the fourth microbatch belongs to the second step
    return raised


def test_a_fault_strikes_where_it_is_told():
    for raised in run_ranks(interrupt_everywhere, 2, env=UNPATCHED):
        for place, text in raised.items():
            assert text.rstrip().endswith(f"ConnectionError: {place}")
        assert "in __next__" in raised["data"]
        assert "in loss_function" in raised["loss"]
        assert "run_backward" in raised["backward"]
