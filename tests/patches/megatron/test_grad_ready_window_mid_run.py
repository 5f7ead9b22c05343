"""megatron.grad-ready-window where a caller changes its ways, does what is Megatron's own business, or is
interrupted, at 2 ranks; see test_grad_ready_window.py."""

import contextlib
from functools import partial

import pytest
from rigs.cells import cells_of
from rigs.megatron.grad_ready import assert_as_without_overlap, needs_learning, one_step, run_case
from rigs.megatron.options import ADAM, GRADS, Interrupted, assert_same_parameters

from megapatch import MegapatchError, apply, restore
from megapatch.testing import destroy_parallel, init_parallel, tiny_gpt

pytestmark = needs_learning

INSTANCES = {**ADAM, "use_distributed_optimizer": True, "ddp": {"num_distributed_optimizer_instances": 2}}
TWICE = ("each", ((2,), (2,), (1, 1), (2,)), {})  # a step whose gradients are finished twice


def found_by(rank, world_size):
    init_parallel()
    restore()
    yield "twice without", partial(run_case, *TWICE)
    apply()
    yield "twice", partial(run_case, *TWICE)
    yield "changed ways", partial(changed_ways, {})
    yield "and back", and_back
    yield "interrupted", interrupted
    yield "instances", several_instances


def changed_ways(options):
    """A caller that has finished in each call leaves it to later, after two; then it begins that step again."""
    steps = [(2,), (2,), (1, 1), (1, 1)]
    model = tiny_gpt(**options, **GRADS)
    found = [one_step(model, step, "last", steps[step]) for step in range(2)]
    message = ""
    try:
        one_step(model, 2, "later", steps[2])
    except MegapatchError as error:
        message = str(error)
    for chunk in model.chunks:
        chunk.finish_grad_sync()
    found += [one_step(model, step, "later", steps[step]) for step in (2, 3)]
    return message, (found, None, model.parameters()), run_case("", steps, options, overlap=False)


def and_back():
    """A caller that has left it to later once, and then finishes in its calls, is not believed to go on so."""
    kinds = (("later", (2,)), ("last", (2,)), ("last", (2,)), ("later", (1, 1)))
    model = tiny_gpt(**GRADS)
    found = [one_step(model, step, kind, cut) for step, (kind, cut) in enumerate(kinds)]
    return (found, None, model.parameters()), run_case("", [cut for _, cut in kinds], {}, overlap=False)


def several_instances():
    """Of the distributed optimizer, which keep no handle."""
    from megatron.core import parallel_state

    destroy_parallel()
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    return changed_ways(INSTANCES)


def interrupted():
    """An exception in a call, which is held or has begun to reduce; then the step again."""
    found = []
    for held in (True, False):
        model = tiny_gpt(**GRADS)
        config = model.config
        finalize, grad_sync = config.finalize_model_grads_func, config.grad_sync_func
        for step in range(2):
            one_step(model, step, "last", (2,))
        config.finalize_model_grads_func = None if held else finalize
        model.zero_grad()
        with contextlib.suppress(Interrupted), raising(model.chunks[0].module.decoder.layers[0]):
            model.forward_backward(2)
        found.append(config.grad_sync_func == grad_sync is not None)
        config.finalize_model_grads_func = finalize
        try:
            found.append(one_step(model, 2, "last", (2,))[2])
        except MegapatchError:
            found.append("is reducing")
    return found


@contextlib.contextmanager
def raising(layer):
    """When it is differentiated for the second time; the gradients of later layers are under way."""
    passes = []

    def hook(*ignored):
        passes.append(1)
        if len(passes) == 2:
            raise Interrupted

    handle = layer.register_full_backward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


ranks = cells_of(found_by, 2)


@pytest.mark.parametrize(("name", "options"), [("changed ways", {}), ("instances", INSTANCES)])
def test_a_second_call_that_comes_too_late_raises_and_the_step_can_begin_anew(ranks, name, options):
    for found_by_name in ranks:
        message, found, expected = found_by_name[name]
        assert "Put all calls of a step but the last in ddp.no_sync()" in message
        assert_as_without_overlap(found, expected, options)


def test_what_comes_after_gradients_are_finished_is_megatrons_own(ranks):
    for found in ranks:
        before, after = found["twice without"], found["twice"]
        assert [norm for norm, *_ in after[0]] == [norm for norm, *_ in before[0]]
        assert after[1] == before[1]
        assert_same_parameters(after[2], before[2])


def test_a_caller_that_has_left_it_to_later_once_may_do_so_again(ranks):
    for found in ranks:
        assert_as_without_overlap(*found["and back"])


def test_an_exception_in_a_call_leaves_nothing_behind(ranks):
    for found in ranks:
        # megatron.parameters-without-gradients waits for what has begun to reduce, where gradients are zeroed.
        assert found["interrupted"] == [True, "early", True, "early"]
