"""Events that often break a model: each is on the timeline, and ranks look closely in the step after it."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
from rigs.audit import Thing, part_of, running_audit, watcher_of
from rigs.cells import AUDITED, run_cells
from rigs.megatron.options import ADAM, UNPATCHED, Interrupted, raising_half_way
from rigs.megatron.save import minor
from rigs.mistakes.checkpoints import plan

from megapatch import audit
from megapatch.audit._audit import Audit, Step
from megapatch.audit._gathered_when_read import GatheredWhenRead
from megapatch.audit._offloads import Offloads
from megapatch.patches._readers import Reader
from megapatch.testing import init_parallel, tiny_gpt

SHARDED = {"dtype": "bf16", **ADAM, "use_distributed_optimizer": True}


def nothing(model):
    """A step of its own."""


def loaded(model):
    model.chunks[0].load_state_dict(model.chunks[0].state_dict())
    model.optimizer.reload_model_params()


def saved(model):
    plan(model.chunks[0].sharded_state_dict())


def interrupted(model):
    with contextlib.suppress(Interrupted), raising_half_way(model, 0):
        model.train_step(1)


def made(model):
    tiny_gpt(layers=4)


def reallocated(model, data):
    """Offload a buffer, and have other memory in its place before it comes back."""
    copy, storage = data.clone(), data.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    model.in_between = torch.empty(size, dtype=torch.uint8)
    storage.resize_(size)
    data.copy_(copy)


def resized(model):
    for buffer in model.chunks[0].buffers:
        reallocated(model, buffer.param_data)


def exchanged(model):
    """Have all parameters in other memory, as a swap by `.data` has."""
    for parameter in model.chunks[0].parameters():
        parameter.data = parameter.data.clone()


def gradients_freed(model):
    for buffer in model.chunks[0].buffers:
        reallocated(model, buffer.grad_data)


def moments_exchanged(model):
    for state in model.optimizer.chained_optimizers[0].optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].clone()


def with_megatrons_helper(model):
    for buffer in model.chunks[0].buffers:
        buffer.offload_to_cpu(move_params=False)
        buffer.reload_from_cpu(move_params=False)


EVENTS = {
    "nothing": (nothing, {}),
    "load": (loaded, {"load": ""}),
    "save": (saved, {"save": ""}),
    "exception": (interrupted, {"exception": "Interrupted"}),
    "model": (made, {"model": "14,176 parameters"}),
    "resized": (resized, {"offload": "other memory of parameters and their buffers"}),
    "exchanged": (exchanged, {"swap": "other memory of parameters"}),
    "gradients": (gradients_freed, {"offload": "other memory of gradients"}),
    "moments": (moments_exchanged, {"offload": "other memory of optimizer state"}),
}
if minor() >= 16:
    EVENTS["helper"] = (with_megatrons_helper, {"offload": "reload_from_cpu()"})


def happened(event):
    """Return what is new on the timeline, whether the next step looks closely, and what is found."""
    init_parallel()
    model, watching, answers = tiny_gpt(layers=4, **SHARDED), running_audit(), []

    def looks():
        answers.append(Audit.looks(watching))
        return answers[-1]

    for step in range(3):
        model.train_step(step)
    before = timeline()
    event(model)
    with mock.patch.object(watching, "looks", looks):
        model.train_step(3)
    new = {kind: latest for kind, latest in timeline().items() if latest != before.get(kind)}
    return new, any(answers), [str(each) for each in (*audit.findings(), *audit.notes())]


def timeline():
    """Return by kind how many events there were, and the latest: what, and where."""
    kinds = running_audit().ledger.timeline.to_dict()
    latest = {kind: [*events["first"], *events["last"]][-1] for kind, events in kinds.items()}
    return {kind: (kinds[kind]["count"], event["what"], event["where"]) for kind, event in latest.items()}


def job(rank, world_size):
    for name, (event, _) in EVENTS.items():
        yield name, partial(happened, event)


@pytest.fixture(scope="module")
def cells():
    (rank,) = run_cells(job, 1, env={**UNPATCHED, **AUDITED, "MEGAPATCH_AUDIT_EVERY": "1000"})
    return rank


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_is_on_the_timeline_and_looked_at_in_the_step_after(cells, name):
    event, expected = EVENTS[name]
    new, looks, found = cells[name]
    assert {kind: what for kind, (_, what, _) in new.items()} == expected
    functions = {where.rpartition(" in ")[2] for _, _, where in new.values()}
    assert functions <= {event.__name__, "happened", "plan_tree"}
    assert looks == bool(expected) and found == []


# ------------------------------------------------------------------------ those that need frameworks
def events_of(watching):
    return {
        kind: [(event["what"], events["count"]) for event in events["first"]]
        for kind, events in watching.ledger.timeline.to_dict().items()
    }


def test_an_export_is_an_event_also_where_all_is_gathered(watching):
    def export_weights(model):
        return "weights"

    export = part_of(watching, GatheredWhenRead).watch_reader(Reader("export_weights", "model"), export_weights)
    watching.may_have_broken = False
    assert export(None) == "weights" and watching.looks()
    assert events_of(watching) == {"export": [("export_weights()", 1)]}


def test_a_helper_that_is_called_for_each_buffer_is_one_event_a_step(watching):
    def pause(*args, **kwargs):
        return args, kwargs

    helper = watcher_of(part_of(watching, Offloads), "TorchMemorySaver.pause")(pause)
    assert [helper("buffer", tag="weights"), helper()] == [(("buffer",), {"tag": "weights"}), ((), {})]
    assert events_of(watching) == {"offload": [("pause()", 1)]}
    watching.ledger.step += 1
    watching.may_have_broken = False
    helper()
    assert watching.looks() and events_of(watching) == {"offload": [("pause()", 2)] * 2}


def test_moments_that_come_in_a_first_step_are_no_event(watching):
    part, state = part_of(watching, Offloads), {}
    optimizer = torch.nn.Identity()  # something that weak references know
    optimizer.optimizer = Thing(state={"parameter": state})
    part.begin_step(Step(optimizer, []))
    state.update(exp_avg=torch.zeros(1), exp_avg_sq=torch.zeros(1))
    part.begin_step(Step(optimizer, []))
    assert events_of(watching) == {}
    state["exp_avg"] = torch.zeros(1)
    part.begin_step(Step(optimizer, []))
    assert events_of(watching) == {"offload": [("other memory of optimizer state", 1)]}
