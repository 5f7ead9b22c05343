"""Calls and steps as parts see them, event by event: what is found, and what is nobody's fault."""

from __future__ import annotations

import inspect
import sys
import time

import pytest
import torch
from rigs.audit import Thing, part_of, watcher_of
from rigs.chunks import Chunk, Group, reported

from megapatch._mcore.bucket_groups import MODULE
from megapatch.audit import _chunks, _gradients, _scaled_once, _step_begins
from megapatch.audit._audit import Call, Step
from megapatch.audit._calls import Calls
from megapatch.audit._gathered_when_read import GatheredWhenRead
from megapatch.audit._gradients import Gradients
from megapatch.audit._hashes import hash_of
from megapatch.audit._loaded_is_there import LoadedIsThere
from megapatch.audit._ranks_agree import RanksAgree
from megapatch.audit._step_begins import StepBegins
from megapatch.audit._training_mode import TrainingMode
from megapatch.errors import AuditError

dist = torch.distributed


# ------------------------------------------------------------------------ every chunk steps
class Events:
    """What `Calls` is shown of three chunks, named by a letter."""

    def __init__(self, watching):
        self.part = part_of(watching, Calls)
        self.chunks = {name: Chunk() for name in "abc"}

    def of(self, names):
        return [self.chunks[name] for name in names]

    def call(self, names, trains=True, returns=True):
        call = Call(self.of(names), trains)
        self.part.begin_call(call)
        call.has_returned = returns
        self.part.end_call(call)

    def eval(self, names):
        self.call(names, trains=False)

    def fail(self, names):
        self.call(names, returns=False)

    def step(self, names):
        """Step on gradients."""
        self._step(names, has_gradients=True)

    def idle(self, names):
        """Step on nothing."""
        self._step(names, has_gradients=False)

    def _step(self, names, has_gradients):
        step = Step(torch.nn.Module(), self.of(names))
        step.has_gradients = has_gradients
        self.part.begin_step(step)
        self.part.end_step(step)

    def drop(self, names):
        for chunk in self.of(names):
            chunk.state.dropped = True

    def write(self, names):
        for chunk in self.of(names):
            chunk.module.weight.main_grad.fill_(1)

    def freeze(self, names):
        for chunk in self.of(names):
            chunk.param_to_bucket_group = {}


@pytest.mark.parametrize(
    ("events", "kinds"),
    [
        ("call ab, step ab, call ab", []),
        ("call ab, step a, call ab", ["left"]),
        ("call ab, step a, step b, call ab", []),
        ("call ab, call ab", []),
        ("call ab, step a, eval ab", []),
        ("eval ab, step a, call ab", []),
        ("fail ab, step a, call ab", []),
        ("call a, step a, call ab, call ab", []),  # another call of the same step
        ("freeze b, call ab, step a, call ab", []),
        ("freeze b, call ab, call ab", []),
        ("call a, idle c, drop a, call a", ["model"]),
        ("idle c, call a, idle c, drop a, call a", ["model"]),
        ("call a, idle c, call a", []),
        ("call a, drop a, call a", []),
        ("call a, step c, drop a, call a", []),
        ("call a, write c, idle c, drop a, call a", []),  # gradients that were written by hand
        ("call a, idle , drop a, call a", []),  # the optimizer of something else
        ("call a, step a, call a, idle c, drop a, call a", []),  # it is stepped now and then
        ("call ac, idle c, drop a, call a", []),
        ("call c, step c, call a, idle c, drop a, call a", []),
        ("call a, idle c, step a, call a, drop a, call a", []),
    ],
)
def test_which_chunks_are_left_by_steps(watching, events, kinds):
    seen = Events(watching)
    for name, _, chunks in (event.partition(" ") for event in events.split(", ")):
        getattr(seen, name)(chunks)
    assert reported(watching) == [("every-chunk-steps", kind) for kind in kinds]
    assert watching.ledger.judged["every-chunk-steps"] == events.count("call") + events.count("fail")
    assert (watching.ledger.place is None) == ("step" not in events and "idle" not in events)


def test_the_rank_is_asked_for_once_and_an_event_has_the_users_line(watching):
    seen = Events(watching)
    seen.call("a")
    (*_, called), watching.ledger.during = watching.ledger.during, ()
    watching.ledger.place = (3, 4, True)
    seen.step("a")
    (*_, stepped) = watching.ledger.during
    assert watching.ledger.place == (3, 4, True) and called != stepped
    seen.part.joined(Thing())
    seen.part.interrupted([])
    kinds = watching.ledger.timeline.to_dict()
    assert [(kind, kinds[kind]["first"][0]["what"]) for kind in kinds] == [
        ("model", "0 parameters"),
        ("exception", ""),
    ]
    assert reported(watching) == []


def test_a_report_is_left_after_some_steps_and_by_the_minute_where_ranks_are_compared(watching, monkeypatch):
    seen, left, now = Events(watching), [], [0.0]
    watching.ledger.changed = lambda: left.append(watching.ledger.step)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    early = [(step, step / 2) for step in range(1, 151)]
    for watching.ledger.step, now[0] in [*early, (200, 124.0), (201, 200.0), (250, 183.0), (300, 184.0)]:
        seen.step("a")
    assert left == [1, 2, 4, 8, 16, 32, 64, 128, 200, 300]


def test_a_step_that_raises_is_one_and_its_gradients_are_excused(watching):
    calls, chunk, optimizer = part_of(watching, Calls), Chunk(), torch.nn.Module()
    watching.models.stepped_by = lambda optimizer: [chunk]
    watch = watcher_of(calls, "FP32Optimizer.step")
    inner = watch(lambda optimizer: (True, None, None))

    def raising(optimizer):
        inner(optimizer)
        raise ValueError

    for step, error in ((watch(raising), ValueError), (watch(inner), AuditError)):
        watching.may_have_broken, chunk.state.excused = False, False
        if error is AuditError:
            part_of(watching, RanksAgree).begin_step = lambda step: (_ for _ in ()).throw(AuditError("found"))
        with pytest.raises(error):
            step(optimizer)
        assert chunk.state.excused and watching.may_have_broken and watching.ledger.step == 1
    del part_of(watching, RanksAgree).begin_step
    watch(inner)(optimizer)
    assert watching.ledger.step == 2 and not watching.may_have_broken and not chunk.state.excused
    assert part_of(watching, LoadedIsThere)._succeeded[optimizer]


@pytest.mark.parametrize(("hook", "kinds"), [(None, []), (min, ["changed"])])
def test_a_hook_that_was_none_may_be_set_in_a_call_and_no_other_may_change(watching, hook, kinds):
    calls, chunk = part_of(watching, Calls), Chunk()
    chunk.config.grad_sync_func, chunk.group.is_last_microbatch = hook, True
    before, call = calls._look([chunk]), Call([chunk], trains=True)
    chunk.config.grad_sync_func, call.has_returned = max, True
    calls._compare(call, before)
    assert reported(watching) == [("hooks-balanced", kind) for kind in kinds]


# ------------------------------------------------------------------------ chunks and buckets
class Wrapped(Chunk):
    """As DistributedDataParallel."""


def test_an_optimizers_chunks_are_those_that_it_has_or_whose_parameters_it_steps(watching, monkeypatch):
    models, first, second, other = watching.models, Wrapped(), Wrapped(), Chunk()
    parts = [torch.nn.Module() for _ in range(3)]
    whole, alone = torch.nn.Module(), torch.nn.Module()
    whole.chained_optimizers = parts
    parts[0].model_chunks, parts[0].param_groups = [other, first], []
    parts[1].float16_groups, parts[1].param_groups = [[second.module.weight]], []
    parts[2].param_groups = [{"params": [torch.nn.Parameter(torch.ones(1))]}]
    alone.param_groups = [{"params": [second.module.weight, first.module.weight]}]
    models.add([first, second])
    assert models.stepped_by(whole) == []
    monkeypatch.setitem(sys.modules, MODULE, Thing(DistributedDataParallel=Wrapped))
    assert models.stepped_by(whole) == models.stepped_by(alone) == [first, second]
    assert models.optimizers_of(first) == models.optimizers_of(second) == [*parts, alone]
    assert models.optimizers_of(other) == [] and models.stepped_by(whole) is not models.stepped_by(alone)
    parts[0].model_chunks = [other]
    assert models.stepped_by(whole) == [first, second]  # it is known
    parts[1].float16_groups = []
    del second
    alone.param_groups = []
    assert models.stepped_by(whole) == []  # one of them is gone, so it is looked for again


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, 4),
        ({"intra_distributed_optimizer_instance_size": 2}, 2),
        ({"inter_distributed_optimizer_instance_group": Thing(size=lambda: 3)}, 12),
        ({"inter_distributed_optimizer_instance_group": None}, 4),
    ],
)
def test_over_how_many_ranks_a_bucket_is_reduced(attributes, expected):
    chunk = Chunk(size=4)
    vars(chunk.group).update(attributes)
    (state,) = _chunks.states_of(chunk)
    assert _chunks.ranks_of(state) == expected


def test_gradients_that_arrive_are_counted_until_they_are_used(watching):
    chunk = Chunk()
    chunk.expert_parallel_buffers = [Thing(grad_data=torch.zeros(1))]
    assert _chunks.first_buffer(chunk) is chunk.buffer and _chunks.first_buffer(chunk.module) is None
    (state,), numbers = _chunks.states_of(chunk), [_chunks.numbers_of([chunk])]
    assert not _chunks.ever_arrived([chunk])
    state.arrivals, state.arrived[0], state.reduces, state.late, arrived = 2, True, 1, ("late",), state.arrived
    numbers.append(_chunks.numbers_of([chunk]))
    assert _chunks.ever_arrived([Chunk(), chunk])
    state.reset()
    state.take()
    assert (state.arrivals, state.before, state.arrived, state.reduces, state.late) == (0, 2, [False], 0, None)
    assert _chunks.ever_arrived([chunk]) and _chunks.numbers_of([chunk]) == numbers[1]
    for buffer in (chunk.buffer, *chunk.expert_parallel_buffers):
        buffer.grad_data.add_(1)
        numbers.append(_chunks.numbers_of([chunk]))
    assert len(set(map(tuple, numbers))) == 4
    state.arrivals = 1
    state.take()
    assert state.before == 3 and state.arrived is arrived  # hooks keep it
    state.had, state.arrived[0] = [True], True
    state.stepped = state.all_had = state.dropped = state.excused = True
    state.begin(watching)
    assert state.before == 0 and state.had == [False]
    assert not (state.stepped or state.all_had or state.dropped or state.excused)
    assert state.watcher is watching and state.arrived is arrived == [False] and state.had is not arrived


# ------------------------------------------------------------------------ gradients
def arrive(gradients, chunk):
    gradients.watch_arrivals(lambda chunk, parameter: lambda *unused: None)(chunk, chunk.module.weight)()


@pytest.mark.parametrize(
    ("stepped", "reduces", "handle", "held", "expected"),
    [
        (False, 0, None, 0, []),
        (False, 1, object(), 0, [("reduced-once", "late")]),
        (False, 1, None, 0, [("reduced-once", "later")]),
        (True, 1, None, 1, [("fresh-gradients", "after-step")]),
        (True, 1, None, 0, []),  # zeroed by hand
    ],
)
@pytest.mark.parametrize("is_zeroed", [False, True])
def test_a_gradient_that_comes_after_a_reduce_or_a_step(
    watching, stepped, reduces, handle, held, expected, is_zeroed
):
    gradients, chunk = part_of(watching, Gradients), Chunk(size=1)
    hook = gradients.watch_arrivals(lambda chunk, parameter: lambda *unused: None)(chunk, chunk.module.weight)
    state = chunk.state
    state.stepped, state.reduces, chunk.group.grad_reduce_handle = stepped, reduces, handle
    chunk.module.weight.main_grad.fill_(held)
    for _ in range(2):
        hook()
        chunk.module.weight.main_grad.fill_(1)
    if is_zeroed:
        state.excused = True
        gradients.zeroed(chunk.buffer)
        assert not (state.excused or state.dropped)
        expected = [pair for pair in expected if pair[1] == "later"]  # a note, at once
    found = Step(torch.nn.Module(), [chunk])
    watching.ledger.has_captured = True
    gradients.begin_step(found)
    kept = [*watching.ledger.findings(), *watching.ledger.notes()]
    assert [(each.rule, each.kind) for each in kept] == expected and not watching.ledger.broken


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_has_gradients_if_one_of_its_chunks_has(watching, size):
    gradients, chunks = part_of(watching, Gradients), [Chunk(size=size), Chunk(size=size)]
    arrive(gradients, chunks[0])
    chunks[0].state.reduces, watching.ledger.has_captured = 1, True
    step = Step(torch.nn.Module(), chunks)
    gradients.begin_step(step)
    assert step.has_gradients and reported(watching) == []
    rules = ("fresh-gradients", "gradients-used", "gradients-dropped", "gradients-arrive", "stepped-once")
    assert watching.ledger.judged == {**dict.fromkeys(rules, 1), "reduced-once": size - 1}


@pytest.mark.parametrize("handle", [None, object()])
def test_a_reduce_that_is_begun_while_another_is_under_way_is_none(watching, handle):
    gradients, chunk = part_of(watching, Gradients), Chunk()
    gradients._join(chunk)
    chunk.group.grad_reduce_handle = handle
    assert _gradients.watch_reduces(lambda group, *args: (group, args))(chunk.group, 1) == (chunk.group, (1,))
    assert chunk.state.reduces == (handle is None)


@pytest.mark.parametrize(
    ("is_sharded", "by_tokens", "world", "kind"),
    [
        (False, False, 2, "averaged"),  # which stays what it is
        (True, False, 2, "repeated"),
        (False, True, 2, "repeated"),
        (False, False, 4, "repeated"),
    ],
)
def test_gradients_that_are_reduced_twice(watching, monkeypatch, is_sharded, by_tokens, world, kind):
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    chunk = Chunk(by_tokens=by_tokens)
    chunk.ddp_config.use_distributed_optimizer = is_sharded
    chunk.state.arrivals, chunk.state.reduces = 1, 2
    part_of(watching, Gradients)._judge_reduces(chunk, _chunks.states_of(chunk))
    assert reported(watching) == [("reduced-once", kind)]


def test_a_step_forgets_what_was_before_it_and_sees_what_is_done_by_hand_after_it(watching):
    gradients, chunk = part_of(watching, Gradients), Chunk()
    optimizer, call = torch.nn.Module(), Call([chunk], trains=True)
    gradients.begin_call(call)
    for by_hand, succeeds in ((False, False), (True, True)):
        arrive(gradients, chunk)
        step, state = Step(optimizer, [chunk]), chunk.state
        state.dropped = state.excused = True
        step.succeeded = succeeds
        gradients._by_hand.add(chunk)
        gradients.finishing([chunk], None)
        gradients.end_step(step)
        assert (state.stepped, state.dropped, state.excused, state.late) == (True, False, False, None)
        assert (optimizer in gradients._used) == succeeds and chunk not in gradients._finished
        if by_hand:
            chunk.buffer.grad_data.mul_(0.5)
        gradients.begin_call(call)
        assert (chunk in gradients._by_hand) == by_hand
    assert not watching.ledger.broken


# ------------------------------------------------------------------------ as a step begins
def added(chunk):
    chunk.buffer.grad_data.add_(1)


def added_unseen(chunk):
    chunk.buffer.grad_data.data.add_(1)


def in_other_memory(chunk):
    chunk.buffer.grad_data.untyped_storage().resize_(8)


@pytest.mark.parametrize(
    ("change", "looks", "is_found"),
    [
        (None, True, False),
        (added, True, True),
        (added, False, True),
        (added_unseen, True, True),
        (added_unseen, False, False),
        (in_other_memory, False, True),
    ],
)
@pytest.mark.parametrize("between", ["", "zeroed", "raised"])
def test_gradients_are_those_that_were_finished(watching, monkeypatch, change, looks, is_found, between):
    begins, chunk, step = part_of(watching, StepBegins), Chunk(), Step(torch.nn.Module(), [])
    monkeypatch.setattr(_step_begins, "chunks_of", lambda model: model)
    step.chunks = [chunk]
    watching.looks = lambda: looks
    finish = watcher_of(begins, "finalize_model_grads")
    if between == "raised":
        with pytest.raises(ZeroDivisionError):
            finish(lambda model: 1 / 0)([chunk])
    else:
        finish(lambda model: None)([chunk])
    assert chunk in part_of(watching, Gradients)._finished
    finish(lambda model: None)(None)  # a model of another kind
    if between == "zeroed":
        begins.zeroed(chunk.buffer)
    if change:
        change(chunk)
    begins._compare_gradients([chunk])
    assert watching.ledger.judged["gradients-kept"] == (not between)
    added(chunk)  # the step itself
    begins._compare_gradients([chunk])
    begins.end_step(step)
    assert reported(watching) == [("gradients-kept", "changed")] * (is_found and not between)


@pytest.mark.parametrize("looks", [True, False])
def test_weights_are_apart_if_their_shard_is_not_their_memory(watching, looks):
    begins, optimizer, together, apart = (
        part_of(watching, StepBegins),
        torch.nn.Module(),
        torch.ones(4),
        torch.ones(4),
    )
    watching.looks = lambda: looks
    for others, shards, is_found in (
        ([], [], False),
        ([together], [together[2:]], False),
        ([together, apart], [together[2:], apart.clone()], looks),
    ):
        optimizer.model_fp32_groups, optimizer.shard_fp32_groups = [others], [shards]
        begins.begin_step(Step(optimizer, []))
        assert reported(watching) == [("kept-between-steps", "memory")] * is_found
    assert [each is apart for each in _step_begins._apart(optimizer)] == [True]


# ------------------------------------------------------------------------ factors of a loss
def test_factors_are_looked_for_above_the_losses_of_tokens_only():
    scale, other, weight = (torch.tensor([each]) for each in (8.0, 3.0, 5.0))
    hidden, mask, learned = torch.ones(4, requires_grad=True), torch.ones(4), torch.ones(1, requires_grad=True)

    def factors(loss):
        return sorted(float(factor) for factor in _scaled_once._factors_of_loss(loss))

    losses = torch.relu(hidden * weight)
    assert factors((losses * mask).sum() / 4 * scale) == [8.0]
    assert factors((losses * scale).mean() * other * learned) == [3.0, 8.0]
    assert factors((other * scale * learned).exp().sum() * scale) == [8.0, 24.0]
    assert factors(None) == factors(torch.ones(1)) == []
    scaled = (losses * scale).view(2, 2)
    for change in (scaled / 2, scaled.double(), scaled.transpose(0, 1), scaled.clone(), scaled * mask.view(2, 2)):
        assert factors(change.exp().sum()) == [], change.grad_fn  # exp() stands for a model
        assert factors(change.sum()) == [8.0], change.grad_fn


# ------------------------------------------------------------------------ ranks, and gathers
@pytest.mark.parametrize(("step", "drops", "forgets", "is_found"), [
    (1, True, False, True), (0, True, False, False), (1, False, False, False), (1, True, True, False)
])  # fmt: skip
def test_a_seed_that_is_set_again_after_a_step_repeats_what_is_dropped(watching, step, drops, forgets, is_found):
    ranks = part_of(watching, RanksAgree)
    part_of(watching, TrainingMode).drops = lambda: drops
    seed = watcher_of(ranks, "model_parallel_cuda_manual_seed")(lambda seed: None)
    seed(7)
    watching.ledger.step = step
    if forgets:
        ranks.forget()
    seed(7)
    seed(8)
    assert reported(watching) == [("seeded-once", "again")] * is_found
    assert all("7 is set again, as it was after 0 optimizer" in note.what for note in watching.ledger.notes())
    assert watching.ledger.judged["seeded-once"] == 2 * step


def test_what_is_hashed_of_parameters_that_wait_for_a_gather(watching):
    ranks, gathers = part_of(watching, RanksAgree), part_of(watching, GatheredWhenRead)
    chunk, other = Chunk(), Chunk()
    chunk.group.buckets.append(Thing(params=[]))
    lists = [[chunk.module.weight], [other.module.weight], [chunk.module.weight, other.module.weight]]

    def unhashed():
        return [row[2] for row in ranks._hashes(lists, (8,)).tolist()]

    assert unhashed() == [0, 0, 0]
    gathers.due.add(chunk.group)
    assert unhashed() == [1, 0, 0]
    assert ranks._hashes(lists, (8,))[1:, :2].tolist() == [hash_of(lists[1], (8,)).tolist()] * 2
    chunk.state.arrivals = 1  # its parameters were used by a forward pass, which gathered them
    assert unhashed() == [0, 0, 0] and gathers.unread() == set()
    lists.append([None])
    assert unhashed() == [1, 1, 1, 1] and watching.ledger.broken


@pytest.mark.parametrize(("overlaps", "succeeds"), [(True, True), (True, False), (False, True)])
def test_a_step_that_is_not_skipped_leaves_parameters_to_be_gathered(watching, overlaps, succeeds):
    gathers, waiting, other = part_of(watching, GatheredWhenRead), Chunk(), Chunk()
    gathers.due.add(waiting.group)
    gathers._received.add(id(other.module.weight))
    waiting.ddp_config.overlap_param_gather = other.ddp_config.overlap_param_gather = overlaps
    step = Step(torch.nn.Module(), [waiting, other])
    gathers.begin_step(step)
    step.succeeded = succeeds
    gathers.end_step(step)
    assert waiting.group in gathers.due and (other.group in gathers.due) == (overlaps and succeeds)
    assert watching.ledger.judged["gathered-when-read"] == overlaps and not gathers._received


@pytest.mark.parametrize(
    ("collective", "arguments", "is_sent", "left"),
    [
        ("broadcast", "a0", True, "ab"),
        ("broadcast", "a1", False, "b"),
        ("broadcast", "x0", False, "ab"),
        ("broadcast", "x1", False, "ab"),
        ("all_gather_into_tensor", "ab", False, ""),
        ("all_gather_into_tensor", "aa", False, "b"),
        ("all_gather_into_tensor", "xa", True, "ab"),
        ("all_gather_into_tensor", "ax", False, "b"),
        ("all_gather", "[a]a", False, "b"),
        ("all_gather", "[x]a", True, "ab"),
        ("gather", "aa", True, "ab"),
        ("send", "a0", True, "ab"),
        ("send", "x0", False, "ab"),
    ],
)
@pytest.mark.parametrize("called", ["in order", "by name", "by Megatron"])
def test_a_parameter_that_is_sent_or_received_by_hand(
    watching, monkeypatch, collective, arguments, is_sent, left, called
):
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    gathers, chunks = part_of(watching, GatheredWhenRead), {name: Chunk() for name in "ab"}
    gathers.due.update(chunk.group for chunk in chunks.values())
    values = {
        "x": torch.ones(1),
        "0": 0,
        "1": 1,
        **{name: chunk.module.weight.data for name, chunk in chunks.items()},
    }
    names = list(arguments.replace("[", "").replace("]", ""))
    output, other = (values[name] for name in names)
    output = [output] if "[" in arguments else output
    watch = watcher_of(gathers, collective)(lambda *args, **options: None)

    def send(*_):
        watch(output, other)

    if called == "by name":
        watch(**dict(zip(inspect.signature(getattr(dist, collective)).parameters, (output, other), strict=False)))
    elif called == "by Megatron":
        watcher_of(gathers, "_ParamAndGradBucketGroup.start_param_sync")(send)(Group())
        is_sent, left = False, "ab"
    else:
        send()
    assert reported(watching) == [("gathered-when-read", "sent")] * is_sent
    assert [name for name, chunk in chunks.items() if chunk.group in gathers.due] == list(left)


def test_a_group_is_received_once_all_its_parameters_are_and_what_is_saved_of_it_is_read(watching):
    gathers, first, second = part_of(watching, GatheredWhenRead), Chunk(), Chunk()
    weights = [chunk.module.weight for chunk in (first, second)]
    first.group.params = {*weights}
    gathers.due.add(first.group)
    for save in ([torch.ones(1)], [{"weight": weights[1].data}]):
        assert reported(watching) == []
        watcher_of(gathers, "save")(lambda *args: None)(save, "a file")
    assert reported(watching) == [("gathered-when-read", "read")]
    for weight in weights:
        assert first.group in gathers.due
        gathers._note_received(weight.data)
    assert first.group not in gathers.due
