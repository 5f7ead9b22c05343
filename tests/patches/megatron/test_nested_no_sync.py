"""megatron.nested-no-sync on the real DistributedDataParallel and the real schedules, at 2 ranks."""

import contextlib
from functools import partial

import pytest
from rigs.cells import cells_of
from rigs.megatron.grad_ready import Reduces
from rigs.megatron.options import ADAM, GRADS, UNPATCHED, Interrupted, assert_same_parameters

from megapatch import apply, restore
from megapatch.testing import init_parallel, tiny_gpt

MICROBATCHES = 4
HALVES = ((2, 2), (2, 2), (4,), (2, 2))
CASES = {  # layout, options, and how each step's microbatches are cut into calls
    # Pipelines go first: 0.12 does not quite forget a layout that is taken down.
    "pp2": ({"pp": 2}, GRADS, HALVES),
    "pp2 vpp2": ({"pp": 2, "vpp": 2}, GRADS, HALVES),
    "dp2": ({}, GRADS, HALVES),
    "dp2 uneven": ({}, GRADS, ((1, 3), (1, 1, 1, 1), (3, 1), (1, 2, 1))),
    "dp2 distributed optimizer": ({}, {**ADAM, **GRADS, "use_distributed_optimizer": True}, HALVES),
    "ep2": ({"ep": 2}, {**GRADS, "experts": 4}, HALVES),
}
IN_ONE_CALL = ((MICROBATCHES,),) * 4


def groups(model):
    return [group for chunk in model.chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]


def may_reduce(model):
    """is_last_microbatch of all bucket groups: True, False, or "some"."""
    flags = {group.is_last_microbatch for group in groups(model)}
    return flags.pop() if len(flags) == 1 else "some"


def step_in_pieces(model, step, cut, at_once=False):
    """One optimizer step from as many calls as `cut` says; what was reduced when, and its gradients."""
    config = model.config
    samples = iter(model.microbatches(step, MICROBATCHES))
    finalize, grad_sync = config.finalize_model_grads_func, config.grad_sync_func
    model.zero_grad()
    reduced, held = [], []
    for index, count in enumerate(cut):
        last = index == len(cut) - 1
        # Each call takes the mean over its own microbatches.
        config.grad_scale_func = lambda loss, share=count / MICROBATCHES: model.optimizer.scale_loss(loss) * share
        config.finalize_model_grads_func = finalize if last else None
        config.grad_sync_func = grad_sync if last else None
        with contextlib.ExitStack() as outer:
            for chunk in () if last else model.chunks:
                outer.enter_context(chunk.no_sync())
            piece = [next(samples) for _ in range(count)]
            reduces = Reduces(at_once)
            with reduces.counted():
                model.forward_backward(microbatches=piece)
            reduced.append(reduces.early + reduces.late)
            held.append(not may_reduce(model))
    gradients = model.gradients()
    model.optimizer.step()
    return reduced, held, gradients


def run_case(name, cuts=None):
    layout, options, its_cuts = CASES[name]
    init_parallel(**layout)
    model = tiny_gpt(layers=4 if "vpp" in layout else 2, **options)
    steps = [step_in_pieces(model, step, cut) for step, cut in enumerate(cuts or its_cuts)]
    return steps, model.parameters(), len(groups(model))


def with_patch(rank, world_size):
    """Each case, cut; and what other uses do."""
    for name in CASES:
        yield name, partial(run_case, name)
    yield "uses", uses


def without_patch(rank, world_size):
    """Each case in one call a step; and what comes of cutting, where that fails."""
    for name in CASES:
        yield name, partial(run_case, name, IN_ONE_CALL[: len(CASES[name][2])])
    for case, cuts in {"calibrated in one call": IN_ONE_CALL[:1] + HALVES[:1], "cut": HALVES[:2]}.items():
        yield case, partial(cut_without, cuts)


def cut_without(cuts):
    """Return the result of each step, up to the first that fails."""
    init_parallel()
    model, found = tiny_gpt(**GRADS), []
    for step, pieces in enumerate(cuts):
        try:
            found.append(step_in_pieces(model, step, pieces, at_once=True))
        except AssertionError as error:
            found.append((str(error), len(groups(model)), may_reduce(model)))
            break
    return found


unpatched = cells_of(without_patch, 2, env=UNPATCHED)
patched = cells_of(with_patch, 2)


# ------------------------------------------------------------------------------------------ the defect
@pytest.mark.quick
def test_without_the_patch_the_inner_no_sync_ends_the_outer_one(unpatched):
    for found in unpatched:
        outcome = found["cut"][0]
        if isinstance(outcome[0], str):  # up to 0.15
            assert "Cannot set grad twice" in outcome[0]
        else:
            _, held, _ = outcome
            assert held == [False, False]
            # The same cut in every step goes well, once Megatron has counted it.
            assert len(found["cut"]) == len(found["calibrated in one call"]) == 2


def test_without_the_patch_a_calibrated_megatron_reduces_early_and_leaves_out_the_rest(unpatched):
    for rank, single in enumerate(unpatched):
        outcome = single["calibrated in one call"][1]
        if isinstance(outcome[0], str):
            assert "Cannot set grad twice" in outcome[0]
            continue
        (early, late), _, gradients = outcome
        _, _, expected = single["dp2"][0][1]
        assert (early, late) == (single["dp2"][2], 0), rank
        with pytest.raises(AssertionError):
            assert_same_parameters(gradients, expected)


# ------------------------------------------------------------------------------------------ the repair
@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick
def test_a_step_cut_in_pieces_is_the_step_of_one_single_call(unpatched, patched, name):
    for single, found in zip(unpatched, patched, strict=True):
        steps, parameters, number = found[name]
        expected_steps, expected_parameters, _ = single[name]
        for (reduced, held, gradients), (expected_reduced, _, expected) in zip(steps, expected_steps, strict=True):
            *before, last = reduced
            assert set(before) <= {0}
            assert [last] == expected_reduced == [number]
            assert held == [True] * len(before) + [False]
            assert_same_parameters(gradients, expected)
        assert_same_parameters(parameters, expected_parameters)


# ------------------------------------------------------------------------------------------ one model, many uses
def uses():
    """Where the bucket groups may reduce, in all kinds of use."""
    init_parallel(ep=2)
    model, found = tiny_gpt(experts=4, **GRADS), {}
    (ddp,) = model.chunks
    found["experts"] = len(ddp.expert_parallel_bucket_groups)
    found["kind"] = isinstance(ddp.no_sync(), contextlib._GeneratorContextManager)

    seen = found["not nested"] = [may_reduce(model)]
    with ddp.no_sync() as value:
        seen.append(may_reduce(model))
    seen += [may_reduce(model), value]

    seen = found["three levels"] = []
    with ddp.no_sync():
        with ddp.no_sync():
            with ddp.no_sync():
                seen.append(may_reduce(model))
            seen.append(may_reduce(model))
        seen.append(may_reduce(model))
        with ddp.no_sync():
            pass
        seen.append(may_reduce(model))
    seen.append(may_reduce(model))

    seen = found["exception"] = []
    raised = Interrupted()
    with ddp.no_sync():
        try:
            with ddp.no_sync():
                raise raised
        except Interrupted as error:
            seen += [error is raised, may_reduce(model)]
    seen.append(may_reduce(model))
    with contextlib.suppress(Interrupted), ddp.no_sync(), ddp.no_sync():
        raise Interrupted
    seen.append(may_reduce(model))

    @ddp.no_sync()
    def decorated():
        return may_reduce(model)

    found["decorator"] = [decorated(), decorated(), may_reduce(model)]

    seen = found["left after the outer one"] = []
    with ddp.no_sync():
        late, later = ddp.no_sync(), ddp.no_sync()
        late.__enter__()
        later.__enter__()
    seen.append(may_reduce(model))
    late.__exit__(None, None, None)
    seen.append(may_reduce(model))
    with ddp.no_sync():
        later.__exit__(None, None, None)
        seen.append(may_reduce(model))
    seen.append(may_reduce(model))

    found["own no_sync"] = _own_no_sync(ddp)
    return found


def _own_no_sync(ddp):
    """Whether train-reentry takes a bound method for the chunk's own, taken before activation and after."""
    from megapatch.patches.megatron._around_train import is_own_no_sync

    after = ddp.no_sync
    restore()
    before = ddp.no_sync
    found = [before == after, is_own_no_sync(after, [ddp])]
    apply()
    return [*found, ddp.no_sync == after, is_own_no_sync(before, [ddp]), is_own_no_sync([after], [ddp])]


@pytest.fixture(scope="module")
def found(patched):
    first, second = (found["uses"] for found in patched)
    assert first == second
    assert first["experts"] > 0
    return first


def test_a_use_that_is_not_nested_is_megatrons_own(found):
    assert found["not nested"] == [True, False, True, None]
    assert found["decorator"] == [False, False, True]
    assert found["kind"]


def test_only_the_outermost_exit_lets_groups_reduce(found):
    assert found["three levels"] == [False, False, False, False, True]
    assert found["exception"] == [True, False, True, True]


def test_a_context_that_is_left_late_brings_nothing_back(found):
    assert found["left after the outer one"] == [True, True, False, True]


def test_train_knows_its_own_no_sync_whenever_it_was_taken(found):
    assert found["own no_sync"] == [False, True, False, True, True]
