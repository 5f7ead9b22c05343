"""hooks-balanced: what a forward-backward call that raised has left, judged as the next one begins."""

from __future__ import annotations

import contextlib
import itertools
from functools import partial

import pytest
from rigs.cells import AUDITED, cells_of
from rigs.megatron.options import BOTH, GRADS, UNPATCHED, Interrupted, new_machine, raising_half_way, rerun_data

from megapatch import audit
from megapatch._mcore.rerun_machine import rewind_interrupted_step
from megapatch.testing import init_parallel, install_cuda_stubs, tiny_gpt


def interrupt(model, step, microbatch=0):
    model.zero_grad()
    with raising_half_way(model, microbatch), contextlib.suppress(Interrupted):
        model.forward_backward(step)


def found():
    return [one.what for one in audit.findings() if one.rule == "hooks-balanced"]


def left(model):
    """A trainer has set a hook for some microbatches, and was interrupted before it put it back."""
    hook = model.config.no_sync_func

    def set_hook(*ignored):
        model.config.no_sync_func = contextlib.nullcontext

    handle = model.chunks[0].module.register_forward_pre_hook(set_hook)
    interrupt(model, 0)
    handle.remove()
    return lambda: setattr(model.config, "no_sync_func", hook)


def timed(model):
    from megatron.core.timers import Timers

    model.config.timers = timers = Timers(2, "minmax")
    model.train_step(0)
    interrupt(model, 1)
    return lambda: [timer.reset() for timer in timers._timers.values()]


def switched(model):
    """A call has switched the forward pre-hooks off, and was interrupted before it switched them on again."""
    (chunk,) = model.chunks
    handle = chunk.module.register_forward_hook(lambda *ignored: chunk.disable_forward_pre_hook(param_sync=False))
    interrupt(model, 0)
    handle.remove()
    return chunk.enable_forward_pre_hook


def called_again(leave, options, repaired):
    """Return what is found before the next call, and after it."""
    model = tiny_gpt(layers=4, **options)
    audit.clear()
    repair = leave(model)
    before = found()
    if repaired:
        repair()
    model.zero_grad()
    with contextlib.nullcontext() if repaired else contextlib.suppress(AssertionError):  # 0.12 asserts
        model.forward_backward(2)
    return before, found()


def rerun(mode, repaired):
    machine, data = new_machine(mode), rerun_data(0)
    model = tiny_gpt(layers=4)
    audit.clear()
    assert machine.should_run_forward_backward(data)
    interrupt(model, 0)
    before = found()
    if repaired:
        rewind_interrupted_step(machine)
    assert machine.should_run_forward_backward(data) == repaired  # else it skips the step
    for _ in range(2):
        machine.should_run_forward_backward(data)
    return before, found()


NOT_PUT_BACK = "a forward-backward call did not put back"
CASES = {
    "left": (called_again, (left, GRADS), f"{NOT_PUT_BACK} config.no_sync_func"),
    "timed": (called_again, (timed, {}), f"{NOT_PUT_BACK} the timer forward-backward"),
    "switched": (called_again, (switched, BOTH), f"{NOT_PUT_BACK} the forward pre-hooks of chunk 0"),
    "rerun": (rerun, ("DISABLED",), "the rerun machine is still INITIAL_RUN"),
    "rerun, validated": (rerun, ("VALIDATE_RESULTS",), "the rerun machine is still INITIAL_RUN"),
}
"""A function, its arguments, and the beginning of what is found."""


def job(rank, world_size):
    init_parallel()
    for (name, (function, args, _)), repaired in itertools.product(CASES.items(), (False, True)):
        yield (name, repaired), partial(function, *args, repaired)


cells = cells_of(job, 1, env={**UNPATCHED, **AUDITED}, setup=install_cuda_stubs)


@pytest.mark.parametrize("name", CASES)
def test_what_an_exception_has_left_is_found_as_the_next_call_begins_unless_it_was_put_right(cells, name):
    before, (what,) = cells[name, False]
    assert before == [] and what.startswith(CASES[name][2])
    assert cells[name, True] == ([], [])
