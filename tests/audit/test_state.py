"""Samples of tensors, parameters, loads and buckets: which are taken; and hashes, of every bit and its place."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.audit import Thing, idle_audit, part_of, watcher_of

from megapatch.audit._audit import Step
from megapatch.audit._chunks import is_zero, state_of
from megapatch.audit._gathered_when_read import _memory_of
from megapatch.audit._gradients import Gradients
from megapatch.audit._hashes import WIDTHS, hash_of
from megapatch.audit._loaded_is_there import LoadedIsThere
from megapatch.audit._ranks_agree import RanksAgree
from megapatch.audit._samples import TENSORS, differences, evenly, sample_of


def noted(watching):
    return [found.rule for found in watching.ledger.notes()]


# ------------------------------------------------------------------------ samples
@pytest.mark.parametrize("count", [0, 1, TENSORS, TENSORS + 1, 1000])
def test_some_of_many_are_looked_at_the_first_and_the_last_among_them(count):
    chosen = evenly(range(count))
    assert len(chosen) == min(count, TENSORS)
    assert chosen[:1] == list(range(count))[:1] and chosen[-1:] == list(range(count))[-1:]


def changed(before, now):
    return any(map(bool, differences(sample_of(before), sample_of(now))))


def test_a_change_is_seen_and_nan_is_no_change():
    weights = torch.tensor([1.0, float("nan"), 3.0])
    assert not changed([weights], [weights.clone()])
    assert changed([weights], [weights * 2])


def test_what_is_offloaded_or_not_in_one_piece_is_left_out():
    emptied = torch.ones(4)
    emptied.untyped_storage().resize_(0)
    assert sample_of([emptied, torch.ones(4, 4).t()]) == {}
    assert not changed([torch.ones(4), torch.ones(4)], [torch.ones(4), emptied])


# ------------------------------------------------------------------------ arrivals
def step_without(watching, lost, **attributes):
    """Step a bucket of two parameters: both have a gradient, and then all but `lost`; return what is noted."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    for name, value in attributes.items():
        setattr(parameters[lost], name, value)
    bucket = Thing(params=parameters)
    chunk = Thing(
        bucket_groups=[Thing(buckets=[bucket])],
        expert_parallel_bucket_groups=[],
        module=Thing(named_parameters=lambda: zip("ab", parameters, strict=True)),
    )
    state = state_of(bucket)
    for arrived in ([True, True], [number != lost for number in range(2)]):
        state.arrived[:], state.arrivals = arrived, sum(arrived)
        part_of(watching, Gradients)._judge_arrivals(Step(torch.nn.Module(), [chunk]))
        state.reset()
    return noted(watching)


def test_a_parameter_that_stops_getting_gradients_is_named(watching):
    assert step_without(watching, 1, requires_grad=False) == ["gradients-arrive"]
    (note,) = watching.ledger.notes()
    assert note.what.startswith("b (requires_grad is False now) had gradients in earlier steps")


def test_an_expert_without_tokens_is_not(watching):
    assert step_without(watching, 1, allreduce=False) == []


def test_nothing_is_judged_once_a_cuda_graph_was_captured(watching):
    watching.ledger.has_captured = True
    assert step_without(watching, 1) == []


# ------------------------------------------------------------------------ loads
class Optimizer:
    """One parameter that has made five steps, and its moments."""

    def __init__(self, moment):
        state = {"step": torch.tensor(5.0), "exp_avg": torch.full((2,), moment)}
        self.optimizer = Thing(state={torch.nn.Parameter(torch.ones(2)): state}, param_groups=[])


GROUPS = {"param_groups": [{"step": 5}]}


@pytest.mark.parametrize(
    ("loaded", "moment", "kinds"),
    [
        ({"optimizer": GROUPS}, 1.0, ["empty"]),  # nothing but step counts
        ({"optimizer": GROUPS, "param_state": None}, 1.0, []),  # another rank has moments
        ({"optimizer": GROUPS, "param_state": [{"exp_avg": torch.ones(2)}]}, 1.0, []),
        ({"optimizer": GROUPS, "param_state": [{"exp_avg": torch.ones(2)}]}, 0.0, ["moments"]),
        ({"optimizer": {"param_groups": [{"step": 4}]}, "param_state": None}, 1.0, ["steps"]),
        ({"optimizer": {"param_groups": [{"step": 0}]}}, 0.0, []),  # of before the first step
    ],
)
def test_what_was_loaded_is_looked_for(watching, loaded, moment, kinds):
    optimizer, loads = Optimizer(moment), part_of(watching, LoadedIsThere)
    watcher_of(loads, "FP32Optimizer.load_state_dict")(lambda *ignored: None)(optimizer, loaded)
    loads.begin_step(Step(optimizer, []))
    found = [*watching.ledger.findings(), *watching.ledger.notes()]
    assert [(each.rule, each.kind) for each in found] == [("loaded-is-there", kind) for kind in kinds]
    assert watching.ledger.judged["loaded-is-there optimizers"] == 1


def test_moments_may_be_loaded_on_their_own(watching):
    optimizer, loads = Optimizer(1.0), part_of(watching, LoadedIsThere)
    watcher_of(loads, "FP32Optimizer.load_state_dict")(lambda *ignored: None)(optimizer, {"optimizer": GROUPS})
    watcher_of(loads, "DistributedOptimizer.load_parameter_state")(lambda *ignored: None)(optimizer, "a file")
    loads.begin_step(Step(optimizer, []))
    assert watching.ledger.findings() == []


# ------------------------------------------------------------------------ schedules
class Schedule:
    """A schedule as the audit sees it, whose optimizer has made five steps, and another optimizer."""

    def __init__(self, watching):
        self.optimizer, self.other, self.num_steps = Optimizer(1.0), Optimizer(1.0), 5
        self.watching, self.part = watching, part_of(watching, LoadedIsThere)
        watch_advance, watch_load = (
            watcher_of(self.part, f"OptimizerParamScheduler.{name}") for name in ("step", "load_state_dict")
        )
        self.made = watch_advance(lambda schedule, increment: None)
        self.advance, self.zero = partial(self.made, self, 1), partial(self.made, self, 0)
        self.load, self.add, self.fail = (partial(watch_load(load), self) for load in (set_steps, add_steps, fail))
        self.zero()  # as it is made

    def step(self, succeeds=True, optimizer=None):
        step = Step(optimizer or self.optimizer, [])
        self.part.begin_step(step)
        self.watching.ledger.step += 1
        step.succeeded = succeeds
        self.part.end_step(step)

    def happen(self, event):
        if event in ("load", "add", "fail"):
            with contextlib.suppress(ZeroDivisionError):
                getattr(self, event)({"num_steps": 5})
        elif event == "rewind":
            self.num_steps = 0
        elif event in ("skip", "other"):
            self.step(succeeds=event != "skip", optimizer=self.other if event == "other" else None)
        elif event == "optimizer":
            watch = watcher_of(self.part, "FP32Optimizer.load_state_dict")
            watch(lambda *ignored: None)(self.optimizer, {"optimizer": GROUPS, "param_state": None})
        else:
            getattr(self, event)()


def set_steps(schedule, state):
    schedule.num_steps = state["num_steps"]
    schedule.made(schedule, state["num_steps"])  # as Megatron does


def add_steps(schedule, state):
    schedule.num_steps += state["num_steps"]


def fail(schedule, state):
    return 1 / 0


@pytest.mark.parametrize(
    ("events", "kinds", "loads"),
    [
        ("advance step advance step advance", [], 0),
        ("step zero advance zero step", [], 0),
        ("step advance advance", ["twice"], 0),
        ("step advance other advance", ["left"], 0),
        ("skip advance", ["after-skip"], 0),
        ("step skip advance skip step advance", [], 0),
        ("step advance skip advance", ["after-skip"], 0),
        ("load step advance", [], 1),
        ("step load advance step", [], 0),
        ("add step", ["schedule"], 1),
        ("fail step", [], 0),
        ("add advance step", [], 0),
        ("load rewind step step", ["rewound"], 1),
        ("load other rewind advance step", [], 0),
        ("optimizer load step", [], 1),
        ("optimizer rewind step", ["schedule"], 0),
    ],
)
def test_how_a_schedule_moves(watching, events, kinds, loads):
    schedule = Schedule(watching)
    for event in events.split():
        schedule.happen(event)
    found = [*watching.ledger.findings(), *watching.ledger.notes()]
    assert [each.kind for each in found] == kinds
    assert kinds != ["left"] or found[0].what.endswith("its optimizer made none of the last 1 optimizer step")
    judged = watching.ledger.judged
    assert judged["learning-rate-moves"] == judged["schedule-once"] == events.count("advance")
    assert judged["loaded-is-there schedules"] == loads
    assert judged["resumed-together"] == loads + events.startswith("optimizer rewind")


# ------------------------------------------------------------------------ buckets
def bucket_of(*main_grads):
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in main_grads]
    for parameter, grad in zip(parameters, main_grads, strict=True):
        parameter.main_grad = torch.tensor([grad])
    return state_of(Thing(params=parameters))


def test_a_parameter_that_had_a_gradient_in_one_step_has_had_one():
    state = bucket_of(0.0, 0.0)
    for arrived in ([True, False], [False, True]):
        assert not state.all_had
        state.arrived[:] = arrived
        state.note_had()
    assert state.had == [True, True] and state.all_had


def test_a_bucket_is_zero_if_others_than_the_fused_gradient_are():
    state = bucket_of(1.0, 0.0)
    first, second = state.parameters
    assert not is_zero(state, second)
    first.grad_added_to_main_grad = True
    assert is_zero(state, first)
    first.grad_added_to_main_grad = False
    assert not is_zero(state, first)


def test_a_bucket_whose_only_gradient_is_fused_may_have_held_others():
    state = bucket_of(1.0)
    (parameter,) = state.parameters
    parameter.grad_added_to_main_grad = True
    assert not is_zero(state, parameter)


# ------------------------------------------------------------------------ hashes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 1023, 1024 * 4 + 5, 1024 * 16])
def test_every_element_counts_at_its_place(dtype, size):
    plain = (torch.arange(size) % 100).to(dtype)
    known = hash_of([plain]).tolist()
    assert hash_of([plain.clone()]).tolist() == known
    assert hash_of([torch.cat([plain[:1], plain])[1:]]).tolist() == known  # not aligned
    for place in {0, size // 2, size - 1}:
        changed = plain.clone()
        changed[place] += 1
        assert hash_of([changed]).tolist() != known
    if size > 1:
        assert hash_of([plain.flip(0)]).tolist() != known
        assert hash_of([plain[:-1], plain[-1:]]).tolist() != known


@pytest.mark.parametrize(("width", "other"), [WIDTHS, WIDTHS[::-1]])
def test_words_that_change_places_in_a_column_of_one_width_do_not_in_the_other(width, other):
    plain = torch.arange(4 * width)
    swapped = plain.clone()
    swapped[0], swapped[width] = plain[width], plain[0]
    assert hash_of([swapped], (width,)).tolist() == hash_of([plain], (width,)).tolist()
    assert hash_of([swapped], (other,)).tolist() != hash_of([plain], (other,)).tolist()


class Quantized(torch.Tensor):
    """As Transformer Engine's tensors: without memory of their own, and with few operators."""

    @staticmethod
    def __new__(cls, **parts):
        data = next(iter(parts.values()))
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)
        vars(made).update(parts)
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if "detach" in str(function):
            return cls(**vars(args[0]))
        raise NotImplementedError(str(function))


def parts(name, scale_name, byte=1, scale=1.0):
    data = torch.arange(64, dtype=torch.uint8)
    data[3] = byte
    return {name: data, scale_name: torch.full((1,), scale)}


NAMES = {"Float8Tensor": ("_data", "_scale_inv"), "MXFP8Tensor": ("_rowwise_data", "_rowwise_scale_inv")}


@pytest.mark.parametrize("kind", NAMES)
def test_of_quantized_parameters_the_bytes_count(kind):
    def hashed(*values):
        return hash_of([torch.nn.Parameter(Quantized(**parts(*NAMES[kind], *values)))]).tolist()

    assert hashed() == hashed() != hashed(2)
    assert (hashed(1, 2.0) != hashed()) == (kind == "Float8Tensor")  # blocks' scales are padded with anything


def test_fp8_itself_is_hashed_by_its_bytes():
    plain = torch.arange(8, dtype=torch.uint8)
    assert hash_of([plain.view(torch.float8_e4m3fn)]).tolist() != hash_of([plain]).tolist()


def test_what_nobody_can_hash_does_not_hide_its_group(caplog):
    unknown, known = torch.nn.Parameter(Quantized(other=torch.ones(4))), torch.nn.Parameter(torch.ones(4))
    chunk = mock.Mock()
    chunk.module.parameters = lambda: [unknown, known]
    part = part_of(idle_audit(), RanksAgree)
    for _ in range(2):
        assert [id(one) for one in part._known([chunk])] == [id(known)]
    assert caplog.text.count("of the class Quantized are not compared") == 1
    assert hash_of([unknown, known]).tolist() == hash_of([known]).tolist()


@pytest.mark.parametrize("kind", NAMES)
def test_what_is_sent_is_known_by_its_bytes(kind):
    made = parts(*NAMES[kind])
    assert made[NAMES[kind][0]].data_ptr() in _memory_of([torch.nn.Parameter(Quantized(**made))])
