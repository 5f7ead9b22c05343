"""megatron.train-reentry after an exception in the middle of the real train(), at 2 ranks."""

import contextlib
import sys
from functools import partial
from unittest import mock

import pytest
from rigs.cells import cells_of, once
from rigs.imported import run_with_megatron
from rigs.megatron.options import (
    ADAM,
    BOTH,
    GRADS,
    UNPATCHED,
    Interrupted,
    assert_same,
    hooks_of,
    needs_training,
    plain_steps,
    raising_half_way,
)
from rigs.step_state import GLOBAL, SCALED, held, new_model

from megapatch import MegapatchError, apply, restore
from megapatch.testing import Fault, MegatronLoop, init_parallel, tiny_gpt

pytestmark = needs_training

PLACES = {  # where, and at which microbatch; a step has two
    "data, before any step": ("data", 0),
    "loss, in the first step": ("loss", 1),
    "half of the backward, in the first step": ("half backward", 1),
    "data, right after a step": ("data", 2),
    "data, right after the second step": ("data", 4),
    "loss, after a step": ("loss", 3),
    "half of the backward, after two steps": ("half backward", 5),
    "half of the backward of a first microbatch": ("half backward", 4),
}
HEALTHY_CALLS = (0, 1)
LONGEST = 2 + 2 + 3  # steps: of a healthy call, before the exception, after it


@pytest.fixture(scope="module")
def reference():
    return run_with_megatron(plain_steps, 2, {}, ADAM, LONGEST, timeout=400, env=UNPATCHED)


def interrupt(loop, place, microbatch, steps=4):
    """Call train(), and raise in the middle."""
    fault, half_way = None, contextlib.nullcontext()
    if place == "half backward":
        half_way = raising_half_way(loop.model, microbatch)
    else:
        fault = Fault(Interrupted(), microbatch=microbatch, place=place)
    with half_way, contextlib.suppress(Interrupted):
        loop.train(steps, fault=fault)
        raise AssertionError("the call was not interrupted")


def state():
    """Of what train() leaves running in this process: rerun state machine and timer."""
    machine = sys.modules["megatron.core.rerun_state_machine"].get_rerun_state_machine()
    timer = sys.modules["megatron.training.global_vars"].get_timers()("interval-time")
    return {"state": machine.state.name, "mode": machine.get_mode().value, "timer": timer._started}


def interrupted_everywhere(rank, world_size, options, rerun_mode):
    """For each place: some good calls, one that is interrupted there, then more; what is left in between."""
    init_parallel()
    found = {}
    for place, (where, microbatch) in PLACES.items():
        for healthy_calls in HEALTHY_CALLS:
            model = tiny_gpt(layers=4, hooks=False, **options)
            loop = MegatronLoop(model, rerun_mode=rerun_mode)
            for _ in range(healthy_calls):
                loop.train(2)
            before = hooks_of(model.config)
            interrupt(loop, where, microbatch)
            left = {**state(), "hooks": hooks_of(model.config) == before}
            loop.iteration += microbatch // loop.num_microbatches  # the steps that were completed
            first = loop.iteration
            losses = loop.train(2) + loop.train(1)
            found[place, healthy_calls] = left, first, losses, model.parameters()
    return found


@pytest.mark.parametrize(
    ("options", "rerun_mode"),
    [
        pytest.param(BOTH, "disabled", id="both", marks=pytest.mark.nightly),
        pytest.param({**BOTH, "align_param_gather": True}, "validate_results", id="both aligned, validating"),
        pytest.param({**ADAM, **GRADS, "use_distributed_optimizer": True}, "disabled", id="grads"),
    ],
)
def test_the_next_call_goes_on_with_the_right_numbers(reference, options, rerun_mode):
    by_rank = run_with_megatron(interrupted_everywhere, 2, options, rerun_mode, timeout=400)
    for place in by_rank[0]:
        for left, *_ in (found[place] for found in by_rank):
            assert left == {"state": "NOT_RUNNING_YET", "mode": rerun_mode, "timer": False, "hooks": True}, place
        assert_same([found[place][2:] for found in by_rank], reference, first=by_rank[0][place][1])


def only_cleared_by_hand(rank, world_size):
    """Act as a fix that only removes the asserts: clear away what they look at, and continue."""
    init_parallel()
    model = tiny_gpt(layers=4, hooks=False, **BOTH)
    loop = MegatronLoop(model)
    interrupt(loop, "data", 4)
    model.config.no_sync_func = None
    sys.modules["megatron.training.global_vars"].get_timers()("interval-time").stop()
    rerun = sys.modules["megatron.core.rerun_state_machine"]
    rerun.get_rerun_state_machine().state = rerun.RerunState.NOT_RUNNING_YET
    loop.iteration = 2
    return loop.train(2)


def test_clearing_away_the_asserts_alone_trains_from_old_parameters_silently(reference):
    losses = run_with_megatron(only_cleared_by_hand, 2, env=UNPATCHED)[0]
    assert losses != pytest.approx([loss for loss, _ in reference[0][2:4]], rel=1e-4)


def activated_after_an_interruption(rank, world_size):
    """The call that was interrupted was Megatron's own: nothing has cleaned up after it."""
    restore()
    init_parallel()
    model = tiny_gpt(layers=4, hooks=False, **BOTH)
    loop = MegatronLoop(model, rerun_mode="validate_results")
    interrupt(loop, "loss", 1)
    left = state()
    apply()
    return left, loop.train(2), model.parameters()


def test_an_activation_after_an_interrupted_call_comes_in_time(reference):
    by_rank = run_with_megatron(activated_after_an_interruption, 2)
    for left, *_ in by_rank:
        assert left == {"state": "INITIAL_RUN", "mode": "validate_results", "timer": True}
    assert_same([found for _, *found in by_rank], reference)


def interrupted_in_evaluation(rank, world_size):
    """There is no validation data, so that evaluate() raises, with the rerun state machine switched off."""
    init_parallel()
    model = tiny_gpt(layers=4, hooks=False, **BOTH)
    loop = MegatronLoop(model, rerun_mode="validate_results", flags=["--eval-interval", "1", "--eval-iters", "1"])
    loop.args.do_valid = True
    try:
        loop.train(2)
    except TypeError as error:
        text = str(error)
    left = state()
    loop.args.do_valid = False
    loop.iteration = 1
    return text, left, loop.train(2), model.parameters()


def test_an_exception_in_evaluation_leaves_the_rerun_state_machine_in_its_mode(reference):
    by_rank = run_with_megatron(interrupted_in_evaluation, 2)
    for text, left, *_ in by_rank:
        assert "NoneType" in text
        assert left == {"state": "NOT_RUNNING_YET", "mode": "validate_results", "timer": False}
    assert_same([found[2:] for found in by_rank], reference, first=1)


def mxfp8_after_an_exception(rank, world_size):
    init_parallel()
    model = tiny_gpt(hooks=False, **BOTH)
    loop = MegatronLoop(model)
    loop.train(1)
    interrupt(loop, "data", 2)
    # On CPU nothing is MXFP8; the switch alone decides.
    object.__setattr__(model.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", True)
    try:
        loop.train(1)
    except MegapatchError as error:
        return str(error)


def test_parameters_that_cannot_be_gathered_any_more_are_an_error_rather_than_other_numbers():
    for text in run_with_megatron(mxfp8_after_an_exception, 2):
        assert "reuse_grad_buf_for_mxfp8_param_ag" in text
        assert "checkpoint" in text


NAMES = (GLOBAL, SCALED)
PLACES_OF_A_STEP = ("loss", "half of the backward", "after finalize", "in the optimizer")


def failing_in_the_second_step(model, place):
    """Return a context in which the second step of a call raises, and the fault to pass to train()."""
    if place == "loss":
        return contextlib.nullcontext(), Fault(Interrupted(), microbatch=3, place="loss")
    if place == "half of the backward":
        return raising_half_way(model, 3), None
    # The optimizer calls the first before anything else, and the second once it has found no overflow.
    name = {"after finalize": "prepare_grads", "in the optimizer": "step_with_ready_grads"}[place]
    original, calls = getattr(model.optimizer, name), iter(range(9))

    def function(*args, **kwargs):
        if next(calls) == 1:
            raise Interrupted
        return original(*args, **kwargs)

    return mock.patch.object(model.optimizer, name, function), None


def two_steps(name, place=None):
    """Return the state after one step in train() and after the next, with an interrupted one between, or none."""
    model = new_model(name, hooks=False)
    loop = MegatronLoop(model)
    if place is None:
        loop.train(1)
    else:
        context, fault = failing_in_the_second_step(model, place)
        with context, contextlib.suppress(Interrupted):
            loop.train(2, fault=fault)
            raise AssertionError("the call was not interrupted")
        loop.iteration += 1
    first = held(model)
    return first, loop.train(1), held(model), model.parameters()


def job(rank, world_size):
    init_parallel()
    for name in NAMES:
        never = once(two_steps, name)
        for place in PLACES_OF_A_STEP:
            yield (name, place), partial(compare, never, name, place)


def compare(never, name, place):
    *expected, parameters = never()
    *found, own = two_steps(name, place)
    assert found == expected
    assert all(value.equal(parameters[name]) for name, value in own.items())


dropped = cells_of(job, 2)


@pytest.mark.parametrize("place", PLACES_OF_A_STEP)
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_step_leaves_nothing(dropped, name, place):
    for found in dropped:
        found[name, place]
