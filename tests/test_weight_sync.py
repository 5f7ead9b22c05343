"""Generation paused around a weight sync: whatever fails or is cancelled, wherever, resumed once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from rigs.weight_sync import PLACES, Failure, World

from megapatch._mcore.main_params import are_lent
from megapatch._pausing.generation import resumed_on_failure
from megapatch.weight_sync import lent_weights, paused_generation

PACKAGE = "megapatch.weight_sync"
DEEDS = [None, "raise", "cancel"]
PLANS = list(itertools.product(DEEDS, repeat=len(PLACES)))  # what happens at each await point


class ByHand(World):
    """The caller pauses and resumes; a failing sync keeps it from the latter."""

    async def bracket(self):
        self.task = asyncio.current_task()
        await self.pause_generation()
        async with resumed_on_failure(self):
            await self.body()
        await self.resume_generation()


def chain(error):
    """The error, and all that it says it came from."""
    found = []
    while error is not None:
        found.append(error)
        error = error.__context__
    return found


def run_all(make, check):
    """Each plan in the same loop; the log records by plan."""

    async def run():
        for plan in PLANS:
            world = make(plan)
            with contextlib.ExitStack() as stack:
                log = stack.enter_context(mock.patch(f"{PACKAGE}.log"))
                for module in ("waiting", "generation"):
                    stack.enter_context(mock.patch(f"megapatch._pausing.{module}.log", log))
                raised = await asyncio.ensure_future(world.raised())
            try:
                check(world, raised, log)
            except AssertionError as error:
                raise AssertionError(f"{world.plan}: calls {world.calls}, raised {raised!r}") from error

    asyncio.run(run())


def reached(world, call):
    """Where the plan had something raised or cancelled in this call."""
    return [place for place in (*world.failed, *world.cancelled) if place.startswith(call)]


def check_visible(world, raised, log):
    """A cancellation is delivered; failures are raised or what that was raised in; a failed resume is logged."""
    assert isinstance(raised, asyncio.CancelledError) == bool(world.cancelled)
    assert (raised is None) == (not world.failed and not world.cancelled)
    seen = [str(error) for error in chain(raised) if isinstance(error, Failure)]
    if world.failed:
        assert world.failed[0] in seen or world.failed[0] in logged(log)
    for place in world.failed:
        if not place.startswith("resume"):
            assert place in seen
        elif place not in seen:
            assert place in logged(log)
            assert sys.version_info < (3, 11) or any(place in note for note in raised.__notes__)


def logged(log):
    return " ".join(str(call) for call in log.error.call_args_list)


@pytest.mark.parametrize("event", [True, False], ids=["event", "no event"])
def test_whatever_happens_where_it_is_resumed_once(event):
    def check(world, raised, log):
        check_visible(world, raised, log)
        paused = not reached(world, "pause")
        assert world.calls.count("pause") == 1
        assert world.calls.count("body") == paused
        assert world.calls.count("resume") == (1 if paused or not event else 0)
        resume_failed = "resume, first" in world.failed
        assert world.paused == (resume_failed if world.calls[-1] == "resume" else True)
        if event:
            assert world.generation_paused_event.is_set() == resume_failed
        assert ("mixture" in logged(log)) == bool(reached(world, "body"))

    run_all(lambda plan: World(plan, event=event), check)


def test_what_was_paused_before_stays_so():
    def check(world, raised, log):
        check_visible(world, raised, log)
        assert world.calls == ["body"]
        assert world.told_paused
        assert world.generation_paused_event.is_set()

    run_all(lambda plan: World(plan, paused=True), check)


@pytest.mark.parametrize("event", [True, False], ids=["event", "no event"])
def test_by_hand_a_failed_body_is_followed_by_one_resume(event):
    def check(world, raised, log):
        if reached(world, "body"):
            check_visible(world, raised, log)
        assert world.calls.count("resume") == (not reached(world, "pause"))
        assert ("mixture" in logged(log)) == bool(reached(world, "body"))

    run_all(lambda plan: ByHand(plan, event=event), check)


async def test_by_hand_what_someone_has_resumed_is_not_resumed_again():
    world = World()
    with pytest.raises(Failure):
        async with resumed_on_failure(world):
            raise Failure
    assert world.calls == []


# ------------------------------------------------------------------------------------------ cancellation
class Endless:
    """A weight sync that does not end by itself."""

    def __init__(self):
        self.began = asyncio.Event()

    async def __call__(self):
        self.began.set()
        await asyncio.Event().wait()


async def test_a_second_cancellation_does_not_lose_the_resume():
    world, body, resuming, go_on = World(), Endless(), asyncio.Event(), asyncio.Event()

    async def resume():
        resuming.set()
        await go_on.wait()
        world.mark(paused=False)

    async def sync():
        async with paused_generation(world, resume=resume):
            await body()

    task = asyncio.ensure_future(sync())
    await body.began.wait()
    for _ in range(3):
        task.cancel()
        await resuming.wait()
        await asyncio.sleep(0)
        assert not task.done()
    assert world.generation_paused_event.is_set()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not world.generation_paused_event.is_set()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout() is from Python 3.11 on")
@pytest.mark.parametrize("slow", ["pause", "body", "resume"])
async def test_a_timeout_is_still_one(slow):
    """It tells its own cancellation from others by their number, so that has to be right."""
    world = World()
    functions = {call: getattr(world, f"{call}_generation", world.body) for call in ("pause", "body", "resume")}

    def maybe_slow(call):
        async def function():
            if call == slow:
                await asyncio.sleep(2)
            await functions[call]()

        return function

    pause, body, resume = map(maybe_slow, functions)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1), paused_generation(world, pause=pause, resume=resume):
            await body()
    assert asyncio.current_task().cancelling() == 0
    assert not world.generation_paused_event.is_set()
    assert world.calls.count("resume") == (slow != "pause")


def test_at_the_end_of_asyncio_run_it_is_resumed():
    """It cancels all that is under way, among which there may be a sync."""
    world = World()

    async def run():
        world.body = Endless()
        task = asyncio.ensure_future(world.bracket())
        await world.body.began.wait()
        return task

    assert asyncio.run(run()).cancelled()
    assert world.calls == ["pause", "resume"]
    assert not world.generation_paused_event.is_set()


def test_weights_are_lent_inside_and_by_this_thread_only():
    with contextlib.suppress(Failure), lent_weights():
        with lent_weights():
            pass
        with ThreadPoolExecutor() as pool:
            assert (are_lent(), pool.submit(are_lent).result()) == (True, False)
        raise Failure
    assert not are_lent()
