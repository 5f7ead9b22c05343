"""Megatron-Bridge's own train() after an exception in the middle of it, at 2 ranks; for its wheels see tox.ini."""

import contextlib
import sys

import pytest
from rigs.megatron.bridge import (
    ALIGNED,
    MXFP8,
    BridgeLoop,
    Fault,
    needs_bridge,
    new_loop,
    ranks,
    reference_of,
    timers_running,
)
from rigs.megatron.options import ADAM, BOTH, GRADS, UNPATCHED, assert_same, attempt, hooks_of, raising_half_way

from megapatch import apply, restore

pytestmark = needs_bridge
reference = reference_of(8)  # steps: the longest of any test


INTERRUPTIONS = (  # good calls before, where in the next one, and at which microbatch; a step has two
    (0, "data", 0),
    (0, "loss", 1),
    (0, "half backward", 1),
    (0, "data", 2),
    (0, "half backward", 5),
    (1, "data", 0),
    (1, "data", 2),
    (1, "loss", 3),
    (1, "data", 4),
)


def interrupt(loop, place, microbatch):
    fault, half_way = None, contextlib.nullcontext()
    if place == "half backward":
        half_way = raising_half_way(loop.model, microbatch)
    else:
        fault = Fault(place, microbatch)
    with half_way:
        loop.interrupted_train(fault)


def left_behind(loop, before):
    """Of what train() leaves running in this process: rerun state machine, timers, the config's hooks."""
    machine = sys.modules["megatron.core.rerun_state_machine"].get_rerun_state_machine()
    hooks = hooks_of(loop.model.config) == before
    return machine.state.name, machine.get_mode().value, timers_running(loop), hooks


def interrupted_everywhere(rank, world_size, options, rerun_mode):
    """For each interruption: what it leaves behind, and how two more calls go on."""
    found = {}
    for interruption in INTERRUPTIONS:
        healthy_calls, place, microbatch = interruption
        loop = new_loop(options, rerun_mode=rerun_mode)
        before = hooks_of(loop.model.config)
        for _ in range(healthy_calls):
            loop.train(2)
        interrupt(loop, place, microbatch)
        left, first = left_behind(loop, before), loop.steps
        losses = loop.train(2) + loop.train(1)
        found[interruption] = left, first, losses, loop.model.parameters()
    return found


@pytest.mark.parametrize(
    ("options", "rerun_mode"),
    [
        pytest.param(BOTH, "disabled", id="both"),
        pytest.param(ALIGNED, "validate_results", id="both aligned, validating"),
        pytest.param(MXFP8, "disabled", id="mxfp8"),
        pytest.param({**ADAM, **GRADS, "use_distributed_optimizer": True}, "disabled", id="grads"),
    ],
)
def test_the_next_call_goes_on_with_the_right_numbers(reference, options, rerun_mode):
    by_rank = ranks(interrupted_everywhere, options, rerun_mode)
    for interruption in INTERRUPTIONS:
        found = [by_place[interruption] for by_place in by_rank]
        healthy_calls, _, microbatch = interruption
        for left, first, *_ in found:
            assert left == ("NOT_RUNNING_YET", rerun_mode, [], True), interruption
            assert first == 2 * healthy_calls + microbatch // 2
        assert_same([run for _, _, *run in found], reference, first=first)


def with_another_global_state(rank, world_size):
    """The caller sets everything up again around the same model after an exception, timers included."""
    loop = new_loop(BOTH)
    loop.interrupted_train(Fault("data", 4))
    loop.model.config.no_sync_func = None  # Bridge's setup insists on it
    again = BridgeLoop(loop.model)
    again.state.train_state.step = loop.steps
    return again.train(2), loop.model.parameters()


def test_another_global_state_for_the_same_model(reference):
    assert_same(ranks(with_another_global_state), reference, first=2)


def interrupted_in_evaluation(rank, world_size):
    loop = new_loop(BOTH, rerun_mode="validate_results")
    before = hooks_of(loop.model.config)
    loop.evaluate_each_step()
    loop.interrupted_train(Fault("evaluation"))
    left, first = left_behind(loop, before), loop.steps
    return left, first, loop.train(2), loop.model.parameters()


def test_an_exception_in_evaluation(reference):
    by_rank = ranks(interrupted_in_evaluation)
    for left, first, *_ in by_rank:
        assert left == ("NOT_RUNNING_YET", "validate_results", [], True)
        assert first == 1
    assert_same([found[2:] for found in by_rank], reference, first=1)


def interrupted_in_evaluation_without(rank, world_size):
    loop = new_loop(ADAM)
    loop.evaluate_each_step()
    loop.interrupted_train(Fault("evaluation"))
    return timers_running(loop), attempt(loop.train, 2)


def test_without_the_patch_evaluation_fails_after_an_exception_in_it():
    running, outcome = ranks(interrupted_in_evaluation_without, env=UNPATCHED)[0]
    assert "eval-time" in running
    assert outcome == ("AssertionError", "timer has already been started")


def exited(rank, world_size):
    """Bridge ends the process where an exit condition is met; a caller may catch that."""
    loop = new_loop(BOTH)
    loop.state.cfg.train.exit_interval = 2
    outcome = attempt(loop.train, 4)
    loop.state.cfg.train.exit_interval = None
    return outcome, loop.train(2), loop.model.parameters()


def test_a_call_that_ended_in_sys_exit_can_be_followed_by_another(reference):
    by_rank = ranks(exited)
    assert {outcome for outcome, *_ in by_rank} == {("SystemExit", "0")}
    assert_same([found[1:] for found in by_rank], reference, first=2)


def activated_after_an_exception(rank, world_size):
    """megapatch comes after a call that was interrupted in its second step."""
    restore()
    loop = new_loop(BOTH)
    loop.interrupted_train(Fault("loss", 3))
    apply()
    return loop.train(2) + loop.train(1), loop.model.parameters()


def test_activation_after_an_exception(reference):
    assert_same(ranks(activated_after_an_exception), reference, first=1)
