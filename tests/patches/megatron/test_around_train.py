"""Parts of megatron.train-reentry around a train(), without megatron.training: each on real megatron.core.

Before 0.17 no wheel has a train(). A framework's copy of it may run on any Megatron.
"""

import contextlib
import importlib
from functools import partial

import pytest
from rigs.cells import once, run_cells
from rigs.megatron.options import (
    ADAM,
    BOTH,
    UNPATCHED,
    Interrupted,
    assert_same,
    attempt,
    hooks_of,
    iterate,
    new_machine,
    plain_steps,
    raising_half_way,
    rerun,
    rerun_data,
)

from megapatch.patches.megatron import _around_train as around
from megapatch.testing import init_parallel, tiny_gpt


def of_timers(raises):
    """Return which of the timers run after a call that started two."""
    timers = importlib.import_module("megatron.core.timers").Timers(0, "minmax")
    timers("of the caller", log_level=0).start()
    with contextlib.suppress(Interrupted), around.timers_stopped(timers):
        for name in (around.INTERVAL_TIMER, "forward-backward"):
            timers(name, log_level=0).start()
        if raises:
            raise Interrupted
    return {name for name, timer in timers._timers.items() if timer._started}


def of_machine():
    """Return the machine's mode and state after an exception in evaluation, and whether another step runs."""
    machine, data = new_machine(), rerun_data(0)
    iterate(machine, data)
    with contextlib.suppress(Interrupted), around.rerun_machine_restored(machine):
        assert machine.should_run_forward_backward(data)
        machine.set_mode(rerun().RerunMode.DISABLED)
        raise Interrupted
    return machine.get_mode().name, machine.state.name, iterate(machine, data)[1]


def of_hooks():
    """Return which hooks a train() finds, and which are there afterwards."""
    model, found = tiny_gpt(**BOTH), {}
    (chunk,), config = model.chunks, model.config
    other = tiny_gpt(**BOTH).chunks[0].no_sync
    for name, hook in {"own": chunk.no_sync, "list": [chunk.no_sync], "another's": other}.items():
        for raises in (False, True):
            config.no_sync_func, config.param_sync_func = hook, chunk.start_param_sync
            before = hooks_of(config)
            with contextlib.suppress(Interrupted), around.without_own_no_sync(config, model.chunks):
                found[name] = config.no_sync_func is None
                config.param_sync_func = None
                if raises:
                    config.grad_sync_func = None
                    raise Interrupted
            after = hooks_of(config)
            if not raises and found[name]:
                before["no_sync_func"] = None
            assert after == before, (name, raises)
    return found


@contextlib.contextmanager
def raising(module, when):
    """Raise in this module's forward pass: before it, or after."""

    def hook(*ignored):
        raise Interrupted

    register = module.register_forward_pre_hook if when == "before" else module.register_forward_hook
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


WHERE = {
    "before the forward": lambda model: raising(model.chunks[0], "before"),
    "half of the forward": lambda model: raising(model.chunks[0].module.decoder.layers[1], "after"),
    "half of the backward": lambda model: raising_half_way(model, 1),
}
STEPS = {
    f"{where}, {'second' if late else 'first'} step": (where, late) for where in WHERE for late in (False, True)
}


def interrupted_step(where, late):
    """Return losses and parameters of three steps, the first of which, or with `late` the second, first raises."""
    model = tiny_gpt(layers=4, **BOTH)
    losses = [model.train_step(0).loss] if late else []
    with contextlib.suppress(Interrupted), around.config_hooks_restored(model.config, model.chunks):
        with WHERE[where](model):
            model.train_step(len(losses))
        raise AssertionError("the step was not interrupted")
    around.finish_earlier_call(model.chunks)
    losses += [model.train_step(step).loss for step in range(len(losses), 3)]
    model.gather_parameters()
    return losses, model.parameters()


def hooks_left_off():
    """Return whether the hooks are on after an exception before and after a step, in which they were off as in
    train()'s first; and the loss of the next step."""
    model = tiny_gpt(layers=4, **BOTH)
    (chunk,) = model.chunks
    chunk.disable_forward_pre_hook()
    on = []
    for steps in (0, 1):
        with contextlib.suppress(Interrupted), around.config_hooks_restored(model.config, model.chunks):
            for step in range(steps):
                model.train_step(step)
            raise Interrupted
        on.append(bool(chunk.remove_forward_pre_hook_handles))
    return on, model.train_step(1).loss


def hooks_that_cannot_gather():
    """Return whether an exception turns the hooks on where they would gather other numbers, and the error that
    arrives where a chunk has no hooks at all (as in 0.16, without a distributed optimizer)."""
    model = tiny_gpt(layers=4, **BOTH)
    (chunk,) = model.chunks
    chunk.disable_forward_pre_hook()
    model.train_step(0)
    # On CPU nothing is MXFP8; the switch alone decides.
    object.__setattr__(chunk.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", True)
    attempt(raised_within, model)
    other = tiny_gpt(**ADAM, overlap_param_gather=True)
    return bool(chunk.remove_forward_pre_hook_handles), attempt(raised_within, other)[0]


def raised_within(model):
    with around.config_hooks_restored(model.config, model.chunks):
        raise Interrupted


def parts(rank, world_size):
    init_parallel()
    yield "timers", lambda: (of_timers(raises=False), of_timers(raises=True))
    yield "machine", of_machine
    yield "hooks", of_hooks
    yield "left off", hooks_left_off
    yield "cannot gather", hooks_that_cannot_gather
    for name, (where, late) in STEPS.items():
        yield name, partial(interrupted_step, where, late)
    yield "plain", lambda: plain_steps(rank, world_size, {}, ADAM, 3)


found = once(lambda: run_cells(parts, 2, env=UNPATCHED))


@pytest.mark.quick
def test_timers_of_the_call_are_stopped_and_the_callers_run_on():
    for of_rank in found():
        assert of_rank["timers"] == ({"of the caller", "forward-backward"}, {"of the caller"})


@pytest.mark.quick
def test_the_rerun_machine_is_before_the_step_and_in_its_mode():
    for of_rank in found():
        assert of_rank["machine"] == ("VALIDATE_RESULTS", "NOT_RUNNING_YET", "NOT_RUNNING_YET")


@pytest.mark.quick
def test_only_its_own_no_sync_is_removed_and_an_exception_restores_all_hooks():
    for of_rank in found():
        assert of_rank["hooks"] == {"own": True, "list": True, "another's": False}


def test_a_forward_pass_outside_of_training_gathers_where_train_had_the_hooks_off():
    for of_rank in found():
        on, loss = of_rank["left off"]
        assert on == [False, True] and loss == pytest.approx(of_rank["plain"][1][0], rel=1e-6)


def test_hooks_that_cannot_gather_are_left_off_and_hide_no_exception():
    for of_rank in found():
        assert of_rank["cannot gather"] == (False, "Interrupted")


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.quick
def test_after_an_interrupted_step_the_numbers_are_those_of_a_run_without_overlap(name):
    assert_same([of_rank[name] for of_rank in found()], [of_rank["plain"] for of_rank in found()])
