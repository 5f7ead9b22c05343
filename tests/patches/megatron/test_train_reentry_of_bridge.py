"""megatron.train-reentry on Megatron-Bridge's own train(), at 2 ranks, in calls one after another and after an
exception in the middle of one; for Bridge's wheels see tox.ini."""

import contextlib
import sys
from functools import partial

import pytest
from rigs.cells import run_cells
from rigs.diagnosed_sources import verdict_of
from rigs.imported import run_with_megatron
from rigs.megatron.bridge import (
    ALIGNED,
    MODULE,
    MXFP8,
    BridgeLoop,
    Fault,
    find_bridge,
    needs_bridge,
    new_loop,
    ranks,
    timers_running,
)
from rigs.megatron.gathers import Collectives
from rigs.megatron.options import (
    ADAM,
    BOTH,
    GRADS,
    UNPATCHED,
    assert_same,
    attempt,
    buckets,
    hooks_of,
    plain_steps,
    raising_half_way,
)

from megapatch import apply, report, restore
from megapatch.patches.megatron._train_reentry_of_bridge import diagnose

pytestmark = needs_bridge


@pytest.fixture(scope="module")
def reference():
    """Steps without overlap, by Megatron's pieces, as many as the longest test has."""
    return run_with_megatron(plain_steps, 2, {}, ADAM, 8, env=UNPATCHED)


# ------------------------------------------------------------------------------------------ the defect
def called_again_without(rank, world_size):
    loop = new_loop(BOTH)
    loop.train(2)
    timer = attempt(loop.train, 2)
    loop.state.timers("interval-time").stop()
    hooks = attempt(loop.train, 2)
    return timer, hooks


def test_without_the_patch_a_second_call_fails_twice_over():
    timer, hooks = ranks(called_again_without, env=UNPATCHED)[0]
    assert timer == ("AssertionError", "timer has already been started")
    assert hooks[0] == "KeyError"
    assert hooks[1].startswith(("DistributedDataParallel(", "GPTModel("))


def called_again_with_timer_stopped_by_hand(rank, world_size):
    loop = new_loop(MXFP8)
    loop.train(2)
    loop.state.timers("interval-time").stop()
    return "is_mxfp8_resume" in loop.module.train.__code__.co_varnames, attempt(loop.train, 3), loop.losses


def test_without_the_patch_a_second_call_with_mxfp8_trains_from_old_parameters_silently(reference):
    resumes, (error, _), losses = ranks(called_again_with_timer_stopped_by_hand, env=UNPATCHED)[0]
    assert error == "KeyError"  # with Bridge from 0.6 on only at the end
    expected = [loss for loss, _ in reference[0]]
    assert len(losses) == (5 if resumes else 2)
    assert losses[:3] == pytest.approx(expected[: len(losses[:3])], rel=1e-6)
    if resumes:
        assert losses[3:] != pytest.approx(expected[3:5], rel=1e-4)


# ------------------------------------------------------------------------------------------ the repair
CASES = {  # layout, options, options of the run without overlap
    "plain": ({}, ADAM, ADAM),
    "grads": ({}, GRADS, {}),
    "both": ({}, BOTH, ADAM),
    "both aligned": ({}, ALIGNED, ADAM),
    "mxfp8": ({}, MXFP8, ADAM),
    "mxfp8 aligned": ({}, {**MXFP8, "align_param_gather": True}, ADAM),
    "pp2 grads": ({"pp": 2}, GRADS, {}),
}


def called_three_times(rank, world_size):
    for name, (layout, options, _) in CASES.items():
        yield name, partial(three_calls, layout, options)


def three_calls(layout, options):
    loop = new_loop(options, layout)
    before = hooks_of(loop.model.config)
    losses = [loss for _ in range(3) for loss in loop.train(2)]
    kept = hooks_of(loop.model.config) == before
    return (losses, loop.model.parameters()), kept, timers_running(loop)


def plain_runs(rank, world_size):
    for name, (layout, _, options) in CASES.items():
        yield name, partial(plain_steps, rank, world_size, layout, options, 6)


@pytest.fixture(scope="module")
def runs():
    """Every rank's findings with train() called again and no other patch, and in the run to compare with."""
    alone = {"MEGAPATCH_ONLY": "megatron.train-reentry"}
    again = run_cells(called_three_times, 2, setup=find_bridge, env=alone)
    return again, run_cells(plain_runs, 2, env=UNPATCHED)


@pytest.mark.parametrize("name", CASES)
def test_three_calls_give_the_numbers_of_a_run_without_overlap_and_without_train(runs, name):
    again, plain = runs
    assert_same([found[name][0] for found in again], [found[name] for found in plain])
    assert all(found[name][1:] == (True, ["interval-time"]) for found in again)


def activated_between_calls(rank, world_size):
    """megapatch comes after the first call."""
    restore()
    loop = new_loop(BOTH)
    holder = sys.modules[__name__]
    holder.train_by_name = loop.module.train
    losses = loop.train(2)
    apply()
    (patch,) = (one for one in report().to_dict()["patches"] if one["name"] == "megatron.train-reentry")
    losses += loop.train(2) + loop.train(2)
    return (losses, loop.model.parameters()), patch["sites"][-1], holder.train_by_name is loop.module.train


def test_activation_between_two_calls(reference):
    by_rank = ranks(activated_between_calls)
    assert_same([run for run, _, _ in by_rank], reference)
    for _, told, rebound in by_rank:
        assert rebound
        assert told["targets"] == [f"{MODULE}:{name}" for name in ("train", "train_step")]


def gathers(rank, world_size, calls, steps):
    loop, counter = new_loop(BOTH), Collectives()
    count = sum(counter.during(loop.train, steps) for _ in range(calls))
    return count, calls * steps * buckets(loop.model.chunks[0])


def test_no_gather_more_than_once_a_step_and_bucket():
    for count, needed in ranks(gathers, 3, 2):
        assert count == needed
    # A first call gathers no more than it does without megapatch.
    assert ranks(gathers, 1, 4) == ranks(gathers, 1, 4, env=UNPATCHED)


# ------------------------------------------------------------------------------------------ what a user has set
def users_own(rank, world_size):
    loop, found = new_loop(BOTH), {}
    config = loop.model.config
    loop.train(1)

    mine = config.param_sync_func = lambda *ignored: None
    loop.interrupted_train(Fault("loss", 1))
    found["param_sync_func after an exception"] = config.param_sync_func is mine
    config.param_sync_func = None

    no_sync = loop.model.chunks[0].no_sync
    mine = config.no_sync_func = lambda: no_sync()
    loop.train(1)
    found["no_sync_func"] = config.no_sync_func is mine

    step = loop.model.optimizer.step
    mine = loop.model.optimizer.step = lambda: step()
    loop.train(1)
    found["optimizer.step"] = loop.model.optimizer.step is mine

    loop.state.timers("mine", log_level=0).start()
    loop.train(1)
    found["timer"] = timers_running(loop) == ["interval-time", "mine"]
    loop.interrupted_train(Fault("data", 2))
    found["timer after an exception"] = timers_running(loop) == ["interval-time", "mine"]
    return found


def test_what_a_user_has_set_stays():
    for found in ranks(users_own):
        assert all(found.values()), found


def shared_buffers(rank, world_size):
    loop = new_loop(BOTH)
    loop.train(1)
    # On CPU nothing is MXFP8; the switch alone decides.
    object.__setattr__(loop.model.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", True)
    return attempt(loop.train, 1), loop.steps


def test_parameters_that_may_be_gradients_are_an_error_rather_than_other_numbers():
    for (error, text), steps in ranks(shared_buffers):
        assert error == "MegapatchError"
        assert "reuse_grad_buf_for_mxfp8_param_ag" in text
        assert steps == 1


# ------------------------------------------------------------------------------------------ after an exception
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
            assert left == ("NOT_RUNNING_YET", rerun_mode, ["interval-time"], True), interruption
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


# ------------------------------------------------------------------------------------------ the diagnosis
def diagnoses(rank, world_size):
    restore()
    loop = new_loop(ADAM)
    module, train = loop.module, loop.module.train
    found = [verdict_of(diagnose, module)]
    lookup = module.__dict__.pop("get_model_config")
    found.append(verdict_of(diagnose, module))
    module.get_model_config = lookup
    module.train = lambda model, optimizer: None
    found.append(verdict_of(diagnose, module))
    del module.train
    found.append(verdict_of(diagnose, module))
    module.train = train
    return [(verdict.kind.name, verdict.reason) for verdict in found]


def test_diagnosis():
    needed, without_name, other_train, no_train = ranks(diagnoses, world_size=1)[0]
    assert needed == ("NEEDED", "train() never stops the interval-time timer it starts")
    assert without_name == ("UNKNOWN", f"expected but not found: {MODULE}.get_model_config")
    assert other_train[0] == "UNKNOWN"
    assert f"parameter global_state of {MODULE}:train" in other_train[1]
    assert f'the text "interval-time" in {MODULE}:train' in other_train[1]
    assert no_train[0] == "UNKNOWN"
    assert f"{MODULE}:train" in no_train[1]
