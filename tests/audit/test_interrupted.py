"""hooks-balanced: what a forward-backward call that raised has left, judged as the next one begins."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial

import pytest
from rigs.cells import AUDITED, run_cells
from rigs.megatron.options import BOTH, GRADS, UNPATCHED, Interrupted, new_machine, raising_half_way, rerun_data

from megapatch import audit
from megapatch._mcore.rerun_machine import rewind_interrupted_step
from megapatch.testing import init_parallel, install_cuda_stubs, tiny_gpt


def interrupt(model, step, microbatch=0):
    model.zero_grad()
    with raising_half_way(model, microbatch), contextlib.suppress(Interrupted):
        model.forward_backward(step)


def found():
    return [(one.rule, one.what) for one in audit.findings() if one.rule == "hooks-balanced"]


def left(repaired):
    """A call whose trainer has set a hook for some microbatches, and was interrupted before it put it back."""
    model = tiny_gpt(layers=4, **GRADS)
    audit.clear()
    hook = model.config.no_sync_func

    def set_hook(*ignored):
        model.config.no_sync_func = contextlib.nullcontext

    handle = model.chunks[0].module.register_forward_pre_hook(set_hook)
    interrupt(model, 0)
    handle.remove()
    before = found()
    if repaired:
        model.config.no_sync_func = hook
    model.zero_grad()
    with contextlib.nullcontext() if repaired else contextlib.suppress(AssertionError):  # 0.12 asserts
        model.forward_backward(1)
    return before, found()


def timed(repaired):
    from megatron.core.timers import Timers

    model = tiny_gpt(layers=4)
    model.config.timers = timers = Timers(2, "minmax")
    audit.clear()
    model.train_step(0)
    interrupt(model, 1)
    if repaired:
        for timer in timers._timers.values():
            timer.reset()
    with contextlib.suppress(AssertionError):
        model.forward_backward(2)
    return found()


def switched(repaired):
    """A call that has switched the forward pre-hooks off, and was interrupted before it switched them on again."""
    model = tiny_gpt(layers=4, **BOTH)
    (chunk,) = model.chunks
    audit.clear()
    handle = chunk.module.register_forward_hook(lambda *ignored: chunk.disable_forward_pre_hook(param_sync=False))
    interrupt(model, 0)
    handle.remove()
    if repaired:
        chunk.enable_forward_pre_hook()
    model.zero_grad()
    model.forward_backward(1)
    return found()


def rerun(repaired, mode):
    machine, data = new_machine(mode), rerun_data(0)
    model = tiny_gpt(layers=4)
    audit.clear()
    assert machine.should_run_forward_backward(data)
    interrupt(model, 0)
    if repaired:
        rewind_interrupted_step(machine)
    ran = machine.should_run_forward_backward(data)
    for _ in range(2):
        machine.should_run_forward_backward(data)
    return ran, found()


KINDS = {"left": left, "timed": timed, "switched": switched}
MODES = ("DISABLED", "VALIDATE_RESULTS")


def job(rank, world_size):
    init_parallel()
    for (name, function), repaired in itertools.product(KINDS.items(), (False, True)):
        yield (name, repaired), partial(function, repaired)
    for mode, repaired in itertools.product(MODES, (False, True)):
        yield (mode, repaired), partial(rerun, repaired, mode)


@pytest.fixture(scope="module")
def cells():
    return run_cells(job, 1, env={**UNPATCHED, **AUDITED}, setup=install_cuda_stubs)[0]


def test_a_hook_that_an_exception_has_left_is_found_as_the_next_call_begins(cells):
    before, ((_, what),) = cells["left", False]
    assert before == []
    assert what == "a forward-backward call did not put back config.no_sync_func"


def test_timers_that_are_still_running_are_found(cells):
    ((_, what),) = cells["timed", False]
    assert "did not put back the timer forward-backward" in what


def test_forward_pre_hooks_that_are_still_off_are_found(cells):
    ((_, what),) = cells["switched", False]
    assert what == "a forward-backward call did not put back the forward pre-hooks of chunk 0"


@pytest.mark.parametrize("mode", MODES)
def test_a_rerun_machine_that_is_still_in_its_step_is_found(cells, mode):
    ran, ((_, what),) = cells[mode, False]
    assert not ran  # it skips the step
    assert "the rerun machine is still INITIAL_RUN" in what


def test_what_was_put_right_by_then_is_not(cells):
    assert cells["left", True] == ([], [])
    assert cells["timed", True] == cells["switched", True] == []
    for mode in MODES:
        assert cells[mode, True] == (True, [])
