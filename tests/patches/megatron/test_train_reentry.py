"""megatron.train-reentry on the real train(), at 2 ranks, in calls one after another and after an exception in the
middle of one; wheels have it from 0.17 on."""

import contextlib
import os
import sys
import time
from functools import partial
from unittest import mock

import pytest
from rigs.cells import cells_of, once, run_cells
from rigs.imported import run_with_megatron
from rigs.megatron.gathers import Collectives
from rigs.megatron.options import (
    ADAM,
    BOTH,
    GRADS,
    UNPATCHED,
    Interrupted,
    assert_same,
    buckets,
    hooks_of,
    needs_training,
    plain_steps,
    raising_half_way,
)
from rigs.step_state import GLOBAL, SCALED, held, new_model
from rigs.where import chosen

from megapatch import MegapatchError, apply, report, restore
from megapatch._cli.demo import train_without
from megapatch.testing import Fault, MegatronLoop, init_parallel, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.testing._training_loop import _ConstantRate

pytestmark = needs_training


def new_loop(options=BOTH, layout=None, *, layers=4, **more):
    """Return Megatron's own loop for a new model."""
    init_parallel(**(layout or {}))
    return MegatronLoop(tiny_gpt(layers=layers, hooks=False, **options), **more)


# ------------------------------------------------------------------------------------------ the defect
@pytest.mark.quick
def test_without_the_patch_a_second_call_fails_three_times_over():
    outcome = run_with_megatron(train_without, 2, env=UNPATCHED)[
        0
    ]  # each failure cleared away by hand before the next
    first, second, third = (text for _, text in outcome.errors)
    assert "config.no_sync_func must be None" in first
    assert "timer has already been started" in second
    assert third.startswith(("KeyError: DistributedDataParallel(", "KeyError: GPTModel("))


# ------------------------------------------------------------------------------------------ the repair
ALIGNED = {**BOTH, "align_param_gather": True}
NIGHTLY = ("dp2 grads", "dp2 both aligned", "pp2 grads")  # parts of the others
CASES = {  # ranks, layout, options, options of the run without overlap
    "dp2": (2, {}, {}, {}),
    "dp2 grads": (2, {}, GRADS, {}),
    "dp2 both": (2, {}, BOTH, ADAM),
    "dp2 both, validated": (2, {}, BOTH, ADAM),
    "dp2 both aligned": (2, {}, ALIGNED, ADAM),
    "pp2 grads": (2, {"pp": 2}, GRADS, {}),
    "pp2 vpp2 dp2 both": (4, {"pp": 2, "vpp": 2}, BOTH, ADAM),
    "ep2 dp2 both": (4, {"ep": 2}, {**BOTH, "experts": 4}, {**ADAM, "experts": 4}),
}


def called_three_times(rank, world_size, wanted):
    """Losses and parameters of each case for so many ranks, after three calls of two steps."""
    for name, (ranks, layout, options, _) in CASES.items():
        if ranks == world_size and name in wanted:
            rerun_mode = "validate_results" if "validated" in name else "disabled"
            yield name, partial(three_calls, layout, options, rerun_mode)


def three_calls(layout, options, rerun_mode):
    loop = new_loop(options, layout, rerun_mode=rerun_mode)
    return [loss for _ in range(3) for loss in loop.train(2)], loop.model.parameters()


def plain_runs(rank, world_size, wanted):
    for name, (ranks, layout, _, options) in CASES.items():
        if ranks == world_size and name in wanted:
            yield name, partial(plain_steps, rank, world_size, layout, options, 6)


@pytest.fixture(scope="module")
def runs(request):
    """By number of ranks: what every rank found with train() called again, and in the run to compare with."""
    wanted = chosen(request, "name")
    return {
        ranks: (
            run_cells(called_three_times, ranks, wanted, audited=True),
            run_cells(plain_runs, ranks, wanted, env=UNPATCHED),
        )
        for ranks in (2, 4)
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in CASES]
)
@pytest.mark.quick
def test_three_calls_give_the_numbers_of_a_run_without_overlap_and_without_train(runs, name):
    again, plain = runs[CASES[name][0]]
    assert_same([found[name] for found in again], [found[name] for found in plain])


# ------------------------------------------------------------------------------------------ one model each
def users_hooks(rank, world_size):
    loop, found = new_loop(layers=2), {}
    config = loop.model.config
    loop.train(1)
    for name, own in {"function": contextlib.nullcontext, "list": [contextlib.nullcontext]}.items():
        config.no_sync_func = own
        try:
            loop.train(1)
        except AssertionError as error:
            found[name] = str(error), config.no_sync_func is own
    config.no_sync_func = None

    param_sync = config.param_sync_func = lambda *ignored: None
    with contextlib.suppress(Interrupted):
        loop.train(2, fault=Fault(Interrupted(), microbatch=1))
    found["param_sync after an exception"] = config.param_sync_func is param_sync

    def set_step(*ignored):
        """Wrap step() while train_step() runs."""
        optimizer.step = mine
        return zero_grad()

    optimizer, stepped = loop.model.optimizer, []
    step, zero_grad = optimizer.step, optimizer.zero_grad
    mine = lambda: stepped.append(step()) or stepped[-1]  # noqa: E731
    with mock.patch.object(optimizer, "zero_grad", set_step):
        loop.train(1)
    loop.train(2)
    found["step set in a step"] = optimizer.step is mine and len(stepped) == 3
    return found


def test_hooks_that_a_user_set_stay_and_meet_megatrons_own_assertion():
    found = run_with_megatron(users_hooks, 2)[0]
    for name in ("function", "list"):
        text, kept = found[name]
        assert "a custom no_sync_func is not supported" in text
        assert kept
    assert found["param_sync after an exception"]
    assert found["step set in a step"]


def last_save(rank, world_size, folder):
    """Do after train() what Megatron's pretrain() does from 0.18 on, by its own function: save, with the time."""
    loop = new_loop(layers=2, flags=["--save", folder, "--save-interval", "2"])
    model, training = loop.model, sys.modules["megatron.training.training"]
    losses, found = loop.train(3), [state()["timer"]]
    training.save_checkpoint_and_time(
        loop.iteration, model.chunks, model.optimizer, None, 0, loop.checkpointing_context
    )
    found.append(state()["timer"])
    interrupt(new_loop(layers=2), "loss", 1)
    return losses, [*found, state()["timer"]], sorted(os.listdir(folder)), model.parameters()


def test_a_call_leaves_the_timer_running_that_pretrain_stops_for_its_last_save(folder):
    plain = run_with_megatron(last_save, 2, f"{folder}/plain", env=UNPATCHED)
    patched = run_with_megatron(last_save, 2, f"{folder}/patched")
    for (*found, parameters), (*expected, of_plain) in zip(patched, plain, strict=True):
        assert found == expected
        assert found[1:] == [[True] * 3, ["iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt"]]
        assert all(parameter.equal(of_plain[name]) for name, parameter in parameters.items())


STEP, BETWEEN = 100, 3600  # seconds


def called_after_an_hour(rank, world_size):
    """Return the interval timer's times after a call with a long step, an hour, and another; by who stops it."""
    found, clock, shift = {}, time.time, []
    for stopped in ("by the next call", "by the caller"):
        loop = new_loop(layers=2)
        step = loop.model.optimizer.step
        with mock.patch("time.time", side_effect=lambda: clock() + sum(shift)):
            loop.train(1)  # Megatron logs the first step of each call
            timer = sys.modules["megatron.training.global_vars"].get_timers()("interval-time")
            loop.model.optimizer.step = lambda step=step: shift.append(STEP) or step()
            loop.train(2)
            loop.model.optimizer.step = step
            if stopped == "by the caller":
                timer.stop()
            shift.append(BETWEEN)
            loop.train(1)
            found[stopped] = timer.elapsed(), timer.active_time()
    return found


def test_the_time_between_two_calls_is_not_that_of_a_step():
    for times in run_with_megatron(called_after_an_hour, 2):
        elapsed, active = times["by the next call"]
        assert elapsed < STEP < 2 * STEP < active < BETWEEN
        elapsed, active = times["by the caller"]  # as in Megatron: what no log has taken is added up
        assert STEP < elapsed < active < BETWEEN


def activated_between_calls(rank, world_size):
    """megapatch comes after the first call; so does a patch of no_sync, whose old bound method train() set."""
    restore()
    loop = new_loop()
    holder = sys.modules[__name__]
    holder.train_by_name = sys.modules["megatron.training.training"].train
    losses = loop.train(2)
    apply()
    _wrap_no_sync()
    (patch,) = (each for each in report().to_dict()["patches"] if each["name"] == "megatron.train-reentry")
    told = patch["sites"][0]
    losses += loop.train(2) + loop.train(2)
    rebound = holder.train_by_name is sys.modules["megatron.training.training"].train
    return losses, loop.model.parameters(), told, rebound


def _wrap_no_sync():
    from megapatch._engine.install import install
    from megapatch.patch import Site

    module = sys.modules["megatron.core.distributed.distributed_data_parallel"]

    def wrap(no_sync):
        def patched(self):
            return no_sync(self)

        patched.__wrapped__ = no_sync
        return patched

    install("test.no-sync", module, Site(module.__name__, None, {"DistributedDataParallel.no_sync": wrap}))


def test_activation_between_two_calls(reference):
    got = run_with_megatron(activated_between_calls, 2)
    assert_same([(losses, parameters) for losses, parameters, _, _ in got], reference)
    for _, _, told, rebound in got:
        assert rebound
        assert told["targets"] == [
            f"megatron.training.training:{name}" for name in ("train", "train_step", "evaluate")
        ]
        assert f"{__name__}:train_by_name" in told["rebound"]


CALLS_AND_STEPS = ((1, 4), (4, 1), (3, 2))


def gathers(rank, world_size, calls_and_steps):
    """How many buckets train() gathers over some calls, and how many it would have to."""
    found = []
    for calls, steps in calls_and_steps:
        loop, counter = new_loop(), Collectives()
        count = sum(counter.during(loop.train, steps) for _ in range(calls))
        found.append((count, calls * steps * buckets(loop.model.chunks[0])))
    return found


def test_no_gather_more_than_once_a_step_and_bucket():
    found = run_with_megatron(gathers, 2, CALLS_AND_STEPS)
    for count, needed in found[0] + found[1]:
        assert count == needed
    # The first call of a process gathers no more than it does without megapatch.
    assert run_with_megatron(gathers, 2, CALLS_AND_STEPS[:1], env=UNPATCHED) == [each[:1] for each in found]


# ------------------------------------------------------------------------------------------ after an exception
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
    return run_with_megatron(plain_steps, 2, {}, ADAM, LONGEST, env=UNPATCHED)


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
    found = {}
    for place, (where, microbatch) in PLACES.items():
        for healthy_calls in HEALTHY_CALLS:
            loop = new_loop(options, rerun_mode=rerun_mode)
            for _ in range(healthy_calls):
                loop.train(2)
            before = hooks_of(loop.model.config)
            interrupt(loop, where, microbatch)
            left = {**state(), "hooks": hooks_of(loop.model.config) == before}
            loop.iteration += microbatch // loop.num_microbatches  # the steps that were completed
            first = loop.iteration
            losses = loop.train(2) + loop.train(1)
            found[place, healthy_calls] = left, first, losses, loop.model.parameters()
    return found


ALONE = {"MEGAPATCH_ONLY": "megatron.train-reentry"}


@pytest.mark.parametrize(
    ("options", "rerun_mode", "env"),
    [
        pytest.param(BOTH, "disabled", {}, id="both", marks=pytest.mark.nightly),
        pytest.param({**BOTH, "align_param_gather": True}, "validate_results", {}, id="both aligned, validating"),
        pytest.param(
            {**ADAM, **GRADS, "use_distributed_optimizer": True},
            "disabled",
            ALONE,
            id="grads",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_next_call_goes_on_with_the_right_numbers(reference, options, rerun_mode, env):
    by_rank = run_with_megatron(interrupted_everywhere, 2, options, rerun_mode, env=env)
    for place in by_rank[0]:
        for left, *_ in (found[place] for found in by_rank):
            assert left == {"state": "NOT_RUNNING_YET", "mode": rerun_mode, "timer": True, "hooks": True}, place
        assert_same([found[place][2:] for found in by_rank], reference, first=by_rank[0][place][1])


def only_cleared_by_hand(rank, world_size):
    """Act as a fix that only removes the asserts: clear away what they look at, and continue."""
    loop = new_loop()
    interrupt(loop, "data", 4)
    loop.model.config.no_sync_func = None
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
    loop = new_loop(rerun_mode="validate_results")
    interrupt(loop, "loss", 1)
    left = state()
    apply()
    losses, timers = loop.train(2), sys.modules["megatron.training.global_vars"].get_timers()
    assert timers("interval-time").active_time() >= 0  # when the interrupted call ended is not known
    return left, losses, loop.model.parameters()


def test_an_activation_after_an_interrupted_call_comes_in_time(reference):
    by_rank = run_with_megatron(activated_after_an_interruption, 2)
    for left, *_ in by_rank:
        assert left == {"state": "INITIAL_RUN", "mode": "validate_results", "timer": True}
    assert_same([found for _, *found in by_rank], reference)


def interrupted_in_evaluation(rank, world_size):
    """There is no validation data, so that evaluate() raises, with the rerun state machine switched off."""
    loop = new_loop(rerun_mode="validate_results", flags=["--eval-interval", "1", "--eval-iters", "1"])
    loop.args.do_valid = True
    try:
        loop.train(2)
    except TypeError as error:
        text = str(error)
    left = state()
    loop.args.do_valid = False
    loop.iteration = 1
    return text, left, loop.train(2), loop.model.parameters()


def test_an_exception_in_evaluation_leaves_the_rerun_state_machine_in_its_mode(reference):
    by_rank = run_with_megatron(interrupted_in_evaluation, 2)
    for text, left, *_ in by_rank:
        assert "NoneType" in text
        assert left == {"state": "NOT_RUNNING_YET", "mode": "validate_results", "timer": False}
    assert_same([found[2:] for found in by_rank], reference, first=1)


def interrupted_in_an_evaluation_of_ones_own(rank, world_size):
    """Return what an evaluate() that raises leaves to a loop of one's own, and the steps after it."""
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import training

    loop = new_loop(rerun_mode="validate_results", flags=["--eval-iters", "1"])
    loop.train(1)
    tower = loop.model.chunks[0].module.decoder.layers[0].eval()  # as a frozen one is
    training.get_timers()("interval-time").stop()
    for _ in range(2):  # the second dies on a timer of the first
        with pytest.raises(ZeroDivisionError):
            training.evaluate(lambda *_: 1 / 0, iter(()), loop.model.chunks, None, loop.model.config)
    chunk = loop.model.chunks[0]
    modes = {module.training for module in tower.modules()}, {chunk.training, chunk.module.training}
    left, data = state(), RerunDataIterator(iter(loop.model.microbatches(0)))
    losses, *_ = training.evaluate(forward_step, data, loop.model.chunks, None, loop.model.config)
    assert losses.keys() == {"loss"}
    return left, modes, loop.train(2), loop.model.parameters()


def test_an_exception_in_an_evaluation_of_ones_own_leaves_nothing(reference):
    by_rank = run_with_megatron(interrupted_in_an_evaluation_of_ones_own, 2)
    for left, modes, *_ in by_rank:
        assert left == {"state": "NOT_RUNNING_YET", "mode": "validate_results", "timer": False}
        assert modes == ({False}, {True})
    assert_same([found[2:] for found in by_rank], reference, first=1)


def mxfp8_after_an_exception(rank, world_size):
    loop = new_loop(layers=2)
    loop.train(1)
    interrupt(loop, "data", 2)
    # On CPU nothing is MXFP8; the switch alone decides.
    object.__setattr__(loop.model.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", True)
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
    return raising_the_second_time(model.optimizer, name), None


def raising_the_second_time(owner, name):
    original, calls = getattr(owner, name), iter(range(9))

    def function(*args, **kwargs):
        if next(calls) == 1:
            raise Interrupted
        return original(*args, **kwargs)

    return mock.patch.object(owner, name, function)


def stepped(context):
    """Return the state after two steps; in the context the second may raise once its optimizer has stepped."""
    model = new_model(SCALED, hooks=False)
    with context, contextlib.suppress(Interrupted):
        MegatronLoop(model).train(2)
    return held(model)


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
    schedule = raising_the_second_time(_ConstantRate, "step")
    yield "stepped", lambda: (stepped(schedule), stepped(contextlib.nullcontext()))


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


def test_what_a_step_has_moved_stays_if_its_optimizer_has_stepped(dropped):
    for found in dropped:
        interrupted, never = found["stepped"]
        assert interrupted == never
