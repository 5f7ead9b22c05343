"""megatron.grad-ready-window on the real schedules, DistributedDataParallel and optimizers, at 2 and 4 ranks.

Up to 0.15 Megatron does not learn from its first step. There nothing is patched, and
test_diagnosis_of_grad_ready_window.py asserts that the diagnosis says so.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from unittest import mock

import pytest
from megatron_rig import ADAM, GRADS, Interrupted, assert_same_parameters

from megapatch import MegapatchError, apply, restore
from megapatch.testing import destroy_parallel, init_parallel, run_ranks, tiny_gpt
from megapatch.versions import find_module

BUFFER = Path(find_module("megatron.core").origin).parent / "distributed" / "param_and_grad_buffer.py"
pytestmark = pytest.mark.skipif(
    "golden_per_param_grad_ready_counts" not in BUFFER.read_text(), reason="this Megatron learns nothing (to 0.15)"
)

DISTRIBUTED = {**ADAM, "use_distributed_optimizer": True}
INSTANCES = {**DISTRIBUTED, "ddp": {"num_distributed_optimizer_instances": 2}}
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


class Reduces:
    """Counts the bucket groups that begin to reduce: before they are finished, and by being finished."""

    def __init__(self):
        self.early = self.late = 0
        self.finishing = False
        self.group = sys.modules["megatron.core.distributed.param_and_grad_buffer"]._ParamAndGradBucketGroup
        self.start, self.finish = self.group.start_grad_sync, self.group.finish_grad_sync

    @contextlib.contextmanager
    def counted(self):
        def start(group, *args, **kwargs):
            before = group.grad_reduce_handle
            self.start(group, *args, **kwargs)
            if group.grad_reduce_handle is not before:
                self.late += self.finishing
                self.early += not self.finishing

        def finish(group, *args, **kwargs):
            self.finishing = True
            self.finish(group, *args, **kwargs)
            self.finishing = False

        with mock.patch.multiple(self.group, start_grad_sync=start, finish_grad_sync=finish):
            yield

    def when(self, groups):
        return {(groups, 0): "early", (0, groups): "late"}.get((self.early, self.late), "some")


def finish_nothing(*args, **kwargs):
    """As SkyRL's own function, which leaves it to the end of the step."""


def one_step(model, step, kind, cut):
    """Calls of the schedule, and the optimizer's step: gradient norm, gradients, when they were reduced."""
    config = model.config
    finalize = config.finalize_model_grads_func
    for name, parameter in model.chunks[0].module.named_parameters():  # before zero_grad() ends the last step
        parameter.requires_grad_(not ("frozen" in kind and str(step) in kind and "layers.0" in name))
    model.zero_grad()
    reduces = Reduces()
    with contextlib.ExitStack() as restored, reduces.counted():
        restored.callback(setattr, config, "finalize_model_grads_func", finalize)
        for index, count in enumerate(cut):
            last = index == len(cut) - 1
            config.finalize_model_grads_func = finish_nothing if kind == "later" else finalize if last else None
            with contextlib.ExitStack() as outer:
                if kind == "no_sync" and not last:
                    outer.enter_context(model.chunks[0].no_sync())
                model.forward_backward(10 * step + index, num_microbatches=count)
        if kind == "later":
            finalize(model.chunks, None)
    gradients = model.gradients()
    _, norm, _ = model.optimizer.step()
    groups = [group for chunk in model.chunks for group in chunk.bucket_groups]
    return float(norm), gradients, reduces.when(len(groups))


def run_case(kind, cuts, options, *expected, overlap=True, layers=2):
    """The steps up to one that fails, what that one says, and parameters at the end."""
    model = tiny_gpt(layers=layers, **options, **(GRADS if overlap else {}))
    if kind == "all count":
        model.config.no_sync_func = None
    steps, error = [], None
    for step, cut in enumerate(cuts):
        try:
            steps.append(one_step(model, step, kind, cut))
        except AssertionError as raised:
            error = str(raised)
            break
    return steps, error, model.parameters()


def references(cases, **more):
    """What each case has to come to: who finishes when does not matter without overlap."""
    found = {}
    for kind, cuts, options, *_ in cases:
        key = key_of(kind, cuts, options)
        if key not in found:
            found[key] = run_case(kind, cuts, {**options, "align_grad_reduce": True}, overlap=False, **more)
    return found


def key_of(kind, cuts, options, *expected):
    return kind if "frozen" in kind else "", cuts, "use_distributed_optimizer" in options


# ------------------------------------------------------------------------------------------ what the ranks do
def data_parallel(rank, world_size):
    """References and defects without patches, then all cases with them; last without megatron.nested-no-sync."""
    restore()
    init_parallel()
    expected = references([*CASES.values(), *DEFECTS.values()])
    defects = {name: run_case(*case) for name, case in DEFECTS.items()}
    apply()
    found = {name: run_case(*case) for name, case in CASES.items()}
    others = {"changed ways": changed_ways({}), "interrupted": interrupted(), "instances": several_instances()}
    restore("megatron.nested-no-sync")
    init_parallel()
    others["no_sync is not nested"] = run_case("no_sync", UNEVEN, {})
    return expected, defects, found, others


def changed_ways(options):
    """A caller that has finished in each call leaves it to later, after two; then it begins that step anew."""
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


def in_pipelines(rank, world_size):
    """By layout: the reference, each case, and what comes of the first without the patch."""
    found = {}
    for name, layout in LAYOUTS.items():
        init_parallel(**layout)
        (reference,) = references(IN_PIPELINE.values(), layers=4).values()
        cases = {case: run_case(*spec, layers=4) for case, spec in IN_PIPELINE.items()}
        restore("megatron.grad-ready-window")
        found[name] = reference, cases, run_case("later", CUT_IN_PIPELINE[:2], {}, layers=4)
        apply()
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(data_parallel, 2)


@pytest.fixture(scope="module")
def pipelines():
    return run_ranks(in_pipelines, 4)


def assert_as_without_overlap(found, expected, options=()):
    """With the distributed optimizer a rank has a part of the gradients."""
    (steps, error, parameters), (expected_steps, _, expected_parameters) = found, expected
    assert error is None
    for (norm, gradients, _), (expected_norm, expected_gradients, _) in zip(steps, expected_steps, strict=True):
        assert norm == pytest.approx(expected_norm, rel=1e-5)
        if "use_distributed_optimizer" not in options:
            assert_same_parameters(gradients, expected_gradients)
    assert_same_parameters(parameters, expected_parameters)


def assert_wrong(steps, expected):
    """The first is right, and the second is reduced before its last pass."""
    (first, second), (expected_first, expected_second) = steps, expected[0][:2]
    assert first[0] == pytest.approx(expected_first[0], rel=1e-5)
    assert second[2] == "early"
    assert second[0] != pytest.approx(expected_second[0], rel=1e-2)


def when(found):
    return " ".join(step[2] for step in found[0])


# ------------------------------------------------------------------------------------------ the defect
def test_without_the_patch_other_windows_than_the_first_fail_or_go_wrong(ranks):
    for expected, found, *_ in ranks:
        for name, words in {
            "fewer calls": "has not been issued",
            "fewer microbatches": "has not been issued",
            "frozen, then not": "",  # a bare assertion
            "not frozen, then frozen": "has not been issued",
        }.items():
            steps, error, _ = found[name]
            assert len(steps) == 1, name
            assert words in error, name
        for name in ("more calls", "more calls, the last finishes", "more microbatches"):
            assert_wrong(found[name][0], expected[key_of(*DEFECTS[name])])


# ------------------------------------------------------------------------------------------ the repair
@pytest.mark.parametrize("name", CASES)
def test_every_step_is_as_without_overlap_and_usual_steps_overlap(ranks, name):
    for expected, _, found, _ in ranks:
        assert_as_without_overlap(found[name], expected[key_of(*CASES[name])], CASES[name][2])
        assert when(found[name]) == CASES[name][3]


def test_without_nested_no_sync_it_holds_at_the_price_of_the_overlap(ranks):
    for expected, *_, others in ranks:
        found = others["no_sync is not nested"]
        assert_as_without_overlap(found, expected[key_of("no_sync", UNEVEN, {})])
        assert when(found) == "late late early late early"


@pytest.mark.parametrize(("name", "options"), [("changed ways", {}), ("instances", INSTANCES)])
def test_a_second_call_that_comes_too_late_raises_and_the_step_can_begin_anew(ranks, name, options):
    for *_, others in ranks:
        message, found, expected = others[name]
        assert "Put all calls of a step but the last in ddp.no_sync()" in message
        assert_as_without_overlap(found, expected, options)


def test_an_exception_in_a_call_leaves_nothing_behind(ranks):
    for *_, others in ranks:
        # What has begun to reduce has to be waited for, as without the patch.
        assert others["interrupted"] == [True, "early", True, "is reducing"]


# ------------------------------------------------------------------------------------------ pipelines
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_pipelines(pipelines, layout):
    for rank in pipelines:
        expected, found, without_patch = rank[layout]
        assert_wrong(without_patch[0], expected)
        for name in IN_PIPELINE:
            assert_as_without_overlap(found[name], expected)
            assert when(found[name]) == IN_PIPELINE[name][3]
