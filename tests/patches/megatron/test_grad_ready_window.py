"""megatron.grad-ready-window on the real schedules, DistributedDataParallel and optimizers, at 2 and 4 ranks.

Up to 0.15 Megatron does not learn from its first step. There nothing is patched, and
test_diagnoses.py asserts that the diagnosis says so.
"""

import contextlib
from functools import partial

import pytest
from rigs.cells import cells_of
from rigs.megatron.grad_ready import assert_as_without_overlap, needs_learning, one_step, run_case
from rigs.megatron.options import ADAM, GRADS, Interrupted, assert_same_parameters

from megapatch import MegapatchError, apply, restore
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = needs_learning

DISTRIBUTED = {**ADAM, "use_distributed_optimizer": True}
# Each step's microbatches, cut into calls.
UNEVEN = (2,), (1, 1), (2,), (1, 1, 1), (2,)
CUT_FIRST = (1, 1), (2,), (2,)
MICROBATCHES = (2,), (3,), (1,), (2,)
ONE_CALL = ((2,),) * 5
CASES = {  # who finishes the gradients, cuts, options, and when gradients are reduced (late: by being finished)
    "later": ("later", UNEVEN, {}, "late late late late late"),
    "in the last call": ("last", UNEVEN, {}, "late late early late early"),
    "in the last call, others in no_sync": ("no_sync", UNEVEN, {}, "late early early early early"),
    "later, cut first": ("later", CUT_FIRST, {}, "late late late"),
    "in the last call, cut first": ("last", CUT_FIRST, {}, "late late early"),
    "all microbatches count": ("all count", MICROBATCHES, {}, "late late late early"),
    "frozen in steps 0 and 3": ("frozen 03", ONE_CALL, {}, "late some early some early"),
    "later, distributed optimizer": ("later", UNEVEN, DISTRIBUTED, "late late late late late"),
    "no_sync, distributed optimizer": ("no_sync", UNEVEN, DISTRIBUTED, "late early early early early"),
    "frozen, distributed optimizer": ("frozen 03", ONE_CALL, DISTRIBUTED, "late some early some early"),
}
DEFECTS = {
    "more calls": ("later", UNEVEN[:2], {}),
    "more calls, the last finishes": ("last", UNEVEN[:2], {}),
    "fewer calls": ("later", CUT_FIRST[:2], {}),
    "more microbatches": ("all count", MICROBATCHES[:2], {}),
    "fewer microbatches": ("all count", MICROBATCHES[1:3], {}),
    "frozen, then not": ("frozen 0", ONE_CALL[:2], {}),
    "not frozen, then frozen": ("frozen 1", ONE_CALL[:2], {}),
}
LAYOUTS = {"pp2 dp2": {"pp": 2}, "pp2 vpp2 dp2": {"pp": 2, "vpp": 2}}
CUT_IN_PIPELINE = (2,), (2, 2), (2,)
IN_PIPELINE = {
    "later": ("later", CUT_IN_PIPELINE, {}, "late late late"),
    "in the last call": ("last", CUT_IN_PIPELINE, {}, "late late early"),
    "in the last call, not aligned": ("last", CUT_IN_PIPELINE, {"align_grad_reduce": False}, "late late early"),
}


def references(cases, **more):
    """Return the expected result of each case, by key: who finishes when does not matter without overlap."""
    found = {}
    for kind, cuts, options, *_ in cases:
        aligned = {**options, "align_grad_reduce": True}
        run = partial(run_case, kind, cuts, aligned, overlap=False, **more)
        found.setdefault(key_of(kind, cuts, options), run)
    return found


def key_of(kind, cuts, options, *expected):
    return kind if "frozen" in kind else "", cuts, "use_distributed_optimizer" in options


# ------------------------------------------------------------------------------------------ what the ranks do
def data_parallel(rank, world_size):
    """References and defects without patches, then all cases with them; last without megatron.nested-no-sync."""
    restore()
    init_parallel()
    for key, run in references([*CASES.values(), *DEFECTS.values()]).items():
        yield ("expected", key), run
    for name, case in DEFECTS.items():
        yield ("defect", name), partial(run_case, *case, at_once=True)
    apply()
    for name, case in CASES.items():
        yield name, partial(run_case, *case)
    restore("megatron.nested-no-sync")
    init_parallel()
    yield "without nested-no-sync", partial(run_case, "no_sync", UNEVEN, {})


def in_pipelines(rank, world_size):
    """By layout: the reference, each case, and what comes of the first without the patch."""
    for layout, sizes in LAYOUTS.items():
        init_parallel(**sizes)
        (reference,) = references(IN_PIPELINE.values(), layers=4).values()
        yield (layout, "expected"), reference
        for case, spec in IN_PIPELINE.items():
            yield (layout, case), partial(run_case, *spec, layers=4)
        restore("megatron.grad-ready-window")
        without = partial(run_case, "later", CUT_IN_PIPELINE[:2], {}, layers=4, at_once=True)
        yield (layout, "without the patch"), without
        apply()


ranks = cells_of(data_parallel, 2)
pipelines = cells_of(in_pipelines, 4)


def assert_wrong(steps, expected):
    """The first is right, and the second is reduced before its last pass."""
    (first, second), (expected_first, expected_second) = steps, expected[0][:2]
    assert first[0] == pytest.approx(expected_first[0], rel=1e-5)
    assert second[2] == "early"
    assert second[0] != pytest.approx(expected_second[0], rel=1e-2)


def when(found):
    return " ".join(step[2] for step in found[0])


# ------------------------------------------------------------------------------------------ the defect
@pytest.mark.quick
def test_without_the_patch_other_windows_than_the_first_fail_or_go_wrong(ranks):
    for found in ranks:
        for name, words in {
            "fewer calls": "has not been issued",
            "fewer microbatches": "has not been issued",
            "frozen, then not": "",  # a bare assertion
            "not frozen, then frozen": "has not been issued",
        }.items():
            steps, error, _ = found["defect", name]
            assert len(steps) == 1, name
            assert words in error, name
        for name in ("more calls", "more calls, the last finishes", "more microbatches"):
            assert_wrong(found["defect", name][0], found["expected", key_of(*DEFECTS[name])])


# ------------------------------------------------------------------------------------------ the repair
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick
def test_every_step_is_as_without_overlap_and_usual_steps_overlap(ranks, name):
    for found in ranks:
        assert_as_without_overlap(found[name], found["expected", key_of(*CASES[name])], CASES[name][2])
        assert when(found[name]) == CASES[name][3]


def test_without_nested_no_sync_it_holds_at_the_price_of_the_overlap(ranks):
    for rank in ranks:
        found = rank["without nested-no-sync"]
        assert_as_without_overlap(found, rank["expected", key_of("no_sync", UNEVEN, {})])
        assert when(found) == "late late early late early"


# ------------------------------------------------------------------------------------------ pipelines
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_pipelines(pipelines, layout):
    for rank in pipelines:
        expected = rank[layout, "expected"]
        assert_wrong(rank[layout, "without the patch"][0], expected)
        for name in IN_PIPELINE:
            assert_as_without_overlap(rank[layout, name], expected)
            assert when(rank[layout, name]) == IN_PIPELINE[name][3]


# ------------------------------------------------------------------------------------------ changing callers
TWICE = ("each", ((2,), (2,), (1, 1), (2,)), {})  # a step whose gradients are finished twice


def found_by(rank, world_size):
    init_parallel()
    restore()
    yield "twice without", partial(run_case, *TWICE)
    apply()
    yield "twice", partial(run_case, *TWICE)
    yield "changed ways", changed_ways
    yield "and back", and_back
    yield "interrupted", interrupted


def changed_ways():
    """A caller that has finished in each call leaves it to later, after two; then it begins that step again."""
    steps = [(2,), (2,), (1, 1), (1, 1)]
    model = tiny_gpt(**GRADS)
    found = [one_step(model, step, "last", steps[step]) for step in range(2)]
    message = ""
    try:
        one_step(model, 2, "later", steps[2])
    except MegapatchError as error:
        message = str(error)
    for chunk in model.chunks:
        chunk.finish_grad_sync()
    found += [one_step(model, step, "later", steps[step]) for step in (2, 3)]
    return message, (found, None, model.parameters()), run_case("", steps, {}, overlap=False)


def and_back():
    """A caller that has left it to later once, and then finishes in its calls, is not believed to go on so."""
    kinds = (("later", (2,)), ("last", (2,)), ("last", (2,)), ("later", (1, 1)))
    model = tiny_gpt(**GRADS)
    found = [one_step(model, step, kind, cut) for step, (kind, cut) in enumerate(kinds)]
    return (found, None, model.parameters()), run_case("", [cut for _, cut in kinds], {}, overlap=False)


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


changing = cells_of(found_by, 2)


def test_a_second_call_that_comes_too_late_raises_and_the_step_can_begin_anew(changing):
    for found_by_name in changing:
        message, found, expected = found_by_name["changed ways"]
        assert "Put all calls of a step but the last in ddp.no_sync()" in message
        assert_as_without_overlap(found, expected)


def test_what_comes_after_gradients_are_finished_is_megatrons_own(changing):
    for found in changing:
        before, after = found["twice without"], found["twice"]
        assert [norm for norm, *_ in after[0]] == [norm for norm, *_ in before[0]]
        assert after[1] == before[1]
        assert_same_parameters(after[2], before[2])


def test_a_caller_that_has_left_it_to_later_once_may_do_so_again(changing):
    for found in changing:
        assert_as_without_overlap(*found["and back"])


def test_an_exception_in_a_call_leaves_nothing_behind(changing):
    for found in changing:
        # megatron.parameters-without-gradients waits for what has begun to reduce, where gradients are zeroed.
        assert found["interrupted"] == [True, "early", True, "early"]
