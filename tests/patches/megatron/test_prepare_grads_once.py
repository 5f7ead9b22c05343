"""megatron.prepare-grads-once on the real optimizers, fp16, 2 ranks: the numbers are those of step() alone."""

import contextlib
import math
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.cells import cells_of, once
from rigs.megatron.options import ADAM, UNPATCHED, Interrupted, assert_same_parameters, attempt

from megapatch.patches.megatron.prepare_grads_once import _prepared
from megapatch.testing import init_parallel, tiny_gpt

SCALE = 2.0**10
FP16 = {"dtype": "fp16", "clip_grad": 0.2, "loss_scale": SCALE}
QUICK = {"loss_scale_window": 2, "hysteresis": 2}
NEVER = {"loss_scale_window": 1000, "hysteresis": 1000}
DISTRIBUTED = {**ADAM, "use_distributed_optimizer": True}
CASES = {  # layout, options; a case with experts has a chain of two optimizers
    "float16": ({}, {}),
    "gradients in fp16": ({}, {"ddp": {"grad_reduce_in_fp32": False}}),
    "distributed": ({}, DISTRIBUTED),
    "experts": ({"ep": 2}, {"experts": 4}),
    "distributed experts": ({"ep": 2}, {**DISTRIBUTED, "experts": 4}),
}
STEPS = ("good", "overflow", "good", "good", "dense overflow", "overflow", "good", "good", "good")


def new_model(case, scaling):
    init_parallel(**CASES[case][0])
    return another_model(case, scaling)


def another_model(case, scaling):
    options = CASES[case][1]
    options = {**options, "optim": {**options.get("optim", {}), **scaling}}
    return tiny_gpt(**FP16, **options)


def scalers(optimizer):
    """Of each child: the loss scale, and how far it is from growing and from shrinking."""
    found = [child.grad_scaler for child in optimizer.chained_optimizers]
    return [(float(one.scale), one._growth_tracker, one._hysteresis_tracker) for one in found]


# ------------------------------------------------------------------------------------------ callers
def step_alone(optimizer):
    return [optimizer.step()]


def prepare_first(optimizer):
    """As slime does without the NaN check: it skips step() after an overflow."""
    if optimizer.prepare_grads():
        return [(False, None, None)]
    assert math.isfinite(optimizer.get_grad_norm())
    return [optimizer.step()]


def prepare_often(optimizer):
    """Each chained optimizer by itself, in another order, then all of them; and step() is not skipped."""
    answers = [child.prepare_grads() for child in reversed(optimizer.chained_optimizers)]
    outcome = optimizer.step()
    assert any(answers) is not outcome[0]
    return [outcome]


def step_children_alone(optimizer):
    """Without the chain: each one clips by its own norm."""
    return [child.step() for child in optimizer.chained_optimizers]


def step_children(optimizer):
    optimizer.prepare_grads()
    return step_children_alone(optimizer)


RUNS = {  # by case and caller: the caller of step() alone to compare with
    **{(case, prepare_first): step_alone for case in CASES},
    ("experts", prepare_often): step_alone,
    ("distributed experts", prepare_often): step_alone,
    ("float16", step_children): step_children_alone,
    ("distributed experts", step_children): step_children_alone,
}
TWICE = ("float16", "gradients in fp16", "distributed experts")


def train(case, caller):
    """By step: whether it succeeded, the norms, the loss scalers, the parameters."""
    model, found = new_model(case, QUICK), []
    for step, kind in enumerate(STEPS):
        factor = 2.0**60 if kind == "overflow" else 1.0
        model.config.grad_scale_func = lambda loss, factor=factor: model.optimizer.scale_loss(loss) * factor
        model.forward_backward(step, num_microbatches=1)
        if kind == "dense overflow":
            for buffer in model.chunks[0].buffers:
                buffer.grad_data.fill_(math.inf)
        outcome = caller(model.optimizer)
        model.zero_grad()
        norms = [math.nan if norm is None else float(norm) for _, norm, _ in outcome]
        found.append(([one[0] for one in outcome], norms, scalers(model.optimizer), model.parameters()))
    return found


def with_patch(rank, world_size):
    for number, run in enumerate(RUNS):
        yield number, partial(train, *run)
    for case in ("experts", "distributed experts"):
        yield case, partial(behaviour, case)


def without_patch(rank, world_size):
    runs = {key: once(train, *key) for key in {(case, alone): None for (case, _), alone in RUNS.items()}}
    for number, ((case, _), reference) in enumerate(RUNS.items()):
        yield number, runs[case, reference]
    for case in TWICE:
        yield case, lambda case=case: (runs[case, step_alone](), train(case, prepare_first))


unpatched = cells_of(without_patch, 2, env=UNPATCHED)
patched = cells_of(with_patch, 2)


# ------------------------------------------------------------------------------------------ the defect
@pytest.mark.parametrize("case", TWICE)
@pytest.mark.quick
def test_without_the_patch_gradients_are_unscaled_twice_and_the_scaler_moves_twice(unpatched, case):
    for found in unpatched:
        alone, twice = found[case]
        _, (expected,), ((scale, tracker, _), *_), parameters = alone[0]
        _, (norm,), ((moved_scale, _, _), *_), moved_parameters = twice[0]
        assert expected > FP16["clip_grad"]
        assert (scale, tracker, moved_scale) == (SCALE, 1, 2 * SCALE)  # it grows after two steps
        if case == "gradients in fp16":  # each time they are unscaled, it is in new copies
            assert norm == pytest.approx(expected)
        else:
            assert norm == pytest.approx(expected / SCALE, rel=1e-3)
            with pytest.raises(AssertionError):
                assert_same_parameters(moved_parameters, parameters)


# ------------------------------------------------------------------------------------------ the repair
@pytest.mark.parametrize("run", range(len(RUNS)), ids=[f"{case}, {caller.__name__}" for case, caller in RUNS])
@pytest.mark.quick
def test_the_numbers_are_those_of_a_caller_of_step_alone(unpatched, patched, run):
    for alone, trained in zip(unpatched, patched, strict=True):
        for got, expected in zip(trained[run], alone[run], strict=True):
            assert got[0] == expected[0]
            assert got[1] == pytest.approx(expected[1], rel=1e-6, nan_ok=True)
            assert got[2] == expected[2]
            assert_same_parameters(got[3], expected[3])


# ------------------------------------------------------------------------------------------ what ends it, what not
class Rig:
    """A chain of two optimizers whose gradients are set again and again to the same numbers."""

    def __init__(self, case):
        self.model = new_model(case, NEVER)
        self.chain, (self.chunk,) = self.model.optimizer, self.model.chunks
        self.dense, self.experts = self.chain.chained_optimizers
        self.buffers = self.chunk.buffers + self.chunk.expert_parallel_buffers
        self.model.train_step()
        self.gradients = [buffer.grad_data.clone() for buffer in self.buffers]

    def fill(self, number=1.0):
        for buffer, gradients in zip(self.buffers, self.gradients, strict=True):
            torch.mul(gradients, number, out=buffer.grad_data)

    def prepare(self):
        """Whether there is an overflow, and the norm of the gradients; afterwards, they count as unprepared."""
        found = self.chain.prepare_grads(), float(self.chain.get_grad_norm())
        self.model.zero_grad()
        return found

    def after(self, ending):
        """Prepare gradients that overflow or not, call `ending`; return the result of preparing new ones."""
        found = []
        for number in (1.0, math.inf):
            self.fill(number)
            assert self.chain.prepare_grads() is (number == math.inf)
            ending(self)
            self.fill()
            found.append(self.prepare())
        return found


def of_each(ending):
    return lambda rig: [ending(child) for child in (rig.dense, rig.experts)]


def broken(name, optimizer):
    """Its step() raises, or its step_with_ready_grads() if what is broken is PyTorch's optimizer."""
    owner, method = (optimizer.optimizer, "step_with_ready_grads") if name == "step" else (optimizer, "step")
    with mock.patch.object(owner, name, side_effect=Interrupted), contextlib.suppress(Interrupted):
        getattr(optimizer, method)()


ENDINGS = {
    "step": lambda rig: rig.chain.step(),
    "step raises": lambda rig: broken("get_grad_norm", rig.chain),
    "step of each": of_each(lambda child: child.step()),
    "step of each raises": of_each(lambda child: broken("clip_grad_norm", child)),
    "step_with_ready_grads": lambda rig: rig.chain.step_with_ready_grads(),
    "step_with_ready_grads of each": of_each(lambda child: child.step_with_ready_grads()),
    "step_with_ready_grads of each raises": of_each(lambda child: broken("step", child)),
    "zero_grad": lambda rig: rig.chain.zero_grad(),
    "load_state_dict": of_each(lambda child: child.load_state_dict(child.state_dict())),
    "zero_grad_buffer": lambda rig: rig.chunk.zero_grad_buffer(),
}


def behaviour(case):
    """Return what preparing again finds, by what has come in between; and what is left of it."""
    rig, others = Rig(case), another_model(case, NEVER)
    rig.fill()
    found = {"first": rig.prepare(), "ended": {name: rig.after(ending) for name, ending in ENDINGS.items()}}

    rig.fill()
    rig.chain.prepare_grads()
    rig.chain.get_grad_norm(), rig.chain.state_dict(), rig.chain.scale_loss(torch.ones(1).cuda())
    others.optimizer.step()
    others.optimizer.zero_grad()
    found["lasts"] = rig.prepare()

    rig.fill()
    with mock.patch.object(rig.experts, "_copy_model_grads_to_main_grads", side_effect=Interrupted):
        found["error"] = attempt(rig.chain.prepare_grads)[0]
    found["after the error"] = rig.prepare()

    rig.fill()
    rig.chain.prepare_grads()
    marked = [child in _prepared for child in (rig.dense, rig.experts)]
    rig.chain.step()
    found["left"] = marked, [child in _prepared for child in (rig.dense, rig.experts)]

    return found


@pytest.fixture(params=["experts", "distributed experts"])
def found(request, patched):
    return [found[request.param] for found in patched]


@pytest.mark.parametrize("name", ENDINGS)
def test_after_these_new_gradients_are_prepared(found, name):
    for rank in found:
        assert rank["first"][0] is False
        for answer in rank["ended"][name]:
            assert answer == pytest.approx(rank["first"])


def test_nothing_else_makes_it_prepare_again(found):
    for rank in found:
        assert rank["lasts"] == pytest.approx(rank["first"])


def test_after_an_exception_only_what_was_not_prepared_is_prepared(found):
    for rank in found:
        assert rank["error"] == "Interrupted"
        assert rank["after the error"] == pytest.approx(rank["first"])


def test_it_keeps_nothing_about_an_optimizer_that_has_stepped(found):
    assert [rank["left"] for rank in found] == [([True, True], [False, False])] * 2
