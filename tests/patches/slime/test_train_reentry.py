"""slime.train-reentry at 2 ranks: on slime's (or miles') own code where SLIME_CHECKOUT names a checkout of it,
else on an imitation. Everything is compared with a run that has no overlap and no megapatch."""

import contextlib
import functools

import pytest
from rigs.cells import RAISING
from rigs.imported import run_with_megatron
from rigs.megatron.gathers import Collectives
from rigs.megatron.options import (
    ADAM,
    BOTH,
    GRADS,
    UNPATCHED,
    assert_same_parameters,
    attempt,
    buckets,
    hooks_of,
    raising_half_way,
)
from rigs.slime.train import Fault, SlimeLoop, find_slime
from rigs.where import chosen, with_nightly

from megapatch.testing import init_parallel, mean_loss, tiny_gpt

pytestmark = pytest.mark.thorough

OPTIONS = {
    "grads": {**ADAM, **GRADS, "use_distributed_optimizer": True},
    "both": BOTH,
    "both, gather aligned": {**BOTH, "align_param_gather": True},
    "both, reduce not aligned": {**BOTH, "align_grad_reduce": False},
}
ORDERS = [  # t: a train() of two steps, s: a save()
    ("both", "tsttsst"),
    ("grads", "tstst"),
    ("both", "ttt"),
    ("both", "sttss"),
    ("both, gather aligned", "sstst"),
    ("both, reduce not aligned", "tstt"),
]
PLACES = {  # where an exception comes from, and how many steps were done then
    "data, before any step": (Fault("data", 0), 0),
    "loss, in the first step": (Fault("loss", 1), 0),
    "half of the backward, in the first step": (1, 0),
    "right after the first step": (Fault("scheduler", 0), 1),
    "data, right after a step": (Fault("data", 2), 1),
    "data, right after the second step": (Fault("data", 4), 2),
    "loss, after a step": (Fault("loss", 3), 1),
    "half of the backward, after two steps": (5, 2),
    "right after the third step": (Fault("scheduler", 2), 3),
}
EXCEPTIONS = [  # the options, the place, the first thing to be called afterwards
    *(("grads", place, "train") for place, (_, done) in PLACES.items() if not done),
    *(("both, gather aligned", place, "train") for place in PLACES),
    *(
        ("both", place, following)
        for place in ("right after the first step", "data, right after a step", "loss, after a step")
        for following in ("save", "forward")
    ),
]
STEPS = 8


def loop_for(options):
    return SlimeLoop(tiny_gpt(layers=4, hooks=False, **options))


# ------------------------------------------------------------------------------------------ without the patch
def unpatched(rank, world_size):
    """The reference, by step: parameters after it, and its (loss, norm) on the rank that logs. And the defects."""
    init_parallel()
    loop, parameters = loop_for({**ADAM, "use_distributed_optimizer": True}), []
    for _ in range(STEPS):
        loop.train(1)
        parameters.append(loop.model.parameters())
    return parameters, loop.log, _defects(), _gathers([(1, 4)])


def _defects():
    grads = loop_for(OPTIONS["grads"])
    grads.train()
    both = loop_for(BOTH)
    both.train()
    found = {"second train": attempt(grads.train), "save": attempt(both.save)}
    both.model.config.no_sync_func = None
    found["second train, assertion out of the way"] = attempt(both.train)
    return found


# ------------------------------------------------------------------------------------------ with it
def patched(rank, world_size, orders, exceptions):
    init_parallel()
    return {
        "orders": {case: _in_order(*case) for case in ORDERS if case in orders},
        "exceptions": {case: _after_exception(*case) for case in EXCEPTIONS if case in exceptions},
        "users": _users_hooks(),
        "mxfp8": _mxfp8(),
        "gathers": _gathers([(1, 4), (4, 1), (3, 2)]),
        "gathers of saves": _gathers_of_saves(),
    }


def _in_order(options, order):
    """The log, and by call the steps done and the parameters: as saved, or after train()."""
    loop, seen = loop_for(OPTIONS[options]), []
    for call in order:
        if call == "t":
            loop.train()
            seen.append((loop.steps, loop.model.parameters()))
        else:
            loop.save()
            seen.append((loop.steps, loop.saved[-1]))
    return loop.log, seen


def _after_exception(options, place, following):
    """Whether the hooks were as before, the steps done, (loss of a forward pass), (saved parameters), the log of
    two more calls, the parameters at the end."""
    loop = loop_for(OPTIONS[options])
    earlier = 0 if options == "grads" else 1  # the very first step is special from Megatron 0.16 on
    if earlier:
        loop.train(earlier)
    before = hooks_of(loop.model.config)
    fault, done = PLACES[place]
    half_way = contextlib.nullcontext()
    if isinstance(fault, int):
        half_way, fault = raising_half_way(loop.model, fault), None
    with half_way:
        loop.interrupted_train(fault)
    kept = hooks_of(loop.model.config) == before
    assert loop.steps == earlier + done
    loss = saved = None
    if following == "forward":
        loss = mean_loss(loop.model.forward_backward(loop.steps, forward_only=True))
    if following == "save":
        loop.save()
        saved = loop.saved[-1]
    done = loop.steps
    loop.log.clear()
    loop.train(2)
    loop.train(1)
    return kept, done, loss, saved, loop.log, loop.model.parameters()


def _users_hooks():
    loop, found = loop_for(BOTH), {}
    config = loop.model.config
    loop.train()
    for name, own in {"function": contextlib.nullcontext, "list": [contextlib.nullcontext]}.items():
        config.no_sync_func = own
        found[name] = attempt(loop.train), config.no_sync_func is own
    config.no_sync_func = None
    for fault in (Fault("data", 0), Fault("loss", 1), Fault("loss", 2)):
        own = config.param_sync_func = functools.partial(print)
        loop.interrupted_train(fault)
        found[fault] = config.param_sync_func is own
    return found


def _mxfp8():
    """On CPU nothing is MXFP8; the switch alone decides."""
    loop = loop_for(BOTH)
    loop.train(1)
    loop.interrupted_train(Fault("scheduler", 0))
    object.__setattr__(loop.model.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", True)
    return attempt(loop.save), attempt(loop.train)


def _gathers(calls_and_steps):
    """By number of calls and steps: how many buckets were gathered, and how many had to be."""
    found = []
    for calls, steps in calls_and_steps:
        loop, counter = loop_for(BOTH), Collectives()
        count = sum(counter.during(loop.train, steps) for _ in range(calls))
        found.append((count, calls * steps * buckets(loop.model.chunks[0])))
    return found


def _gathers_of_saves():
    """In units of all buckets. The second save() in a row finds the hooks on and really takes them off."""
    loop, counter = loop_for(BOTH), Collectives()
    loop.train()
    counts = [counter.during(call) for call in (loop.save, loop.save, loop.train, loop.save)]
    return [count / buckets(loop.model.chunks[0]) for count in counts]


@pytest.fixture(scope="module")
def plain():
    return run_with_megatron(unpatched, 2, env=UNPATCHED, setup=find_slime)


@pytest.fixture(scope="module")
def repaired(request):
    wanted = chosen(request, "options", "order"), chosen(request, "options", "place", "following")
    return run_with_megatron(patched, 2, *wanted, env=RAISING, setup=find_slime)


def assert_as_plain(by_rank, plain, what):
    """`by_rank`: for each rank (log, [(steps done, parameters)]), where the log begins with step `first`."""
    for (log, first, seen), (parameters, plain_log, *_) in zip(by_rank, plain, strict=True):
        for losses, expected in zip(zip(*log, strict=True), zip(*plain_log[first:], strict=True), strict=False):
            assert losses == pytest.approx(expected[: len(losses)], rel=1e-5), what
        for done, found in seen:
            if done:
                assert_same_parameters(found, parameters[done - 1])


def test_what_fails_without_the_patch(plain):
    for _, _, defects, _ in plain:
        assert "config.no_sync_func must be None" in defects["second train"][1]
        for what in ("save", "second train, assertion out of the way"):
            assert defects[what][0] == "KeyError"


@pytest.mark.parametrize(("options", "order"), with_nightly(ORDERS))
def test_train_and_save_in_any_order(plain, repaired, options, order):
    got = [found["orders"][options, order] for found in repaired]
    assert got[0][0], "nothing was logged"
    assert_as_plain([(log, 0, seen) for log, seen in got], plain, (options, order))


@pytest.mark.parametrize(("options", "place", "following"), with_nightly(EXCEPTIONS))
def test_after_an_exception(plain, repaired, options, place, following):
    got = [found["exceptions"][options, place, following] for found in repaired]
    for kept, done, loss, saved, _, _ in got:
        assert kept
        if loss is not None:
            assert loss == pytest.approx(plain[0][1][done][0], rel=1e-5)
        assert (saved is not None) == (following == "save")
    assert_as_plain(
        [
            (log, done, [*([(done, saved)] if saved else []), (done + 3, parameters)])
            for _, done, _, saved, log, parameters in got
        ],
        plain,
        (options, place),
    )


def test_hooks_that_a_user_set_stay_and_meet_slimes_own_assertion(repaired):
    found = repaired[0]["users"]
    for name in ("function", "list"):
        (error, text), kept = found.pop(name)
        assert error == "AssertionError"
        assert "a custom no_sync_func is not supported" in text
        assert kept
    assert len(found) == 3
    assert all(found.values()), found


def test_parameters_that_cannot_be_gathered_are_neither_saved_nor_trained_on(repaired):
    for found in repaired:
        for error, text in found["mxfp8"]:
            assert error == "MegapatchError"
            assert "load a checkpoint" in text


def test_no_gather_more_than_slime_needs(plain, repaired):
    for found in repaired:
        for count, needed in found["gathers"]:
            assert count == needed
        assert found["gathers of saves"] == [0, 1, 2, 0]
    assert [found["gathers"][:1] for found in repaired] == [gathers for *_, gathers in plain]
