"""Which group is picked, against a reference that tries them all; what tags have to have; the buffer in memory."""

from __future__ import annotations

import asyncio
import random
import re

import pytest
from rigs.streaming.world import World

from megapatch import MegapatchError
from megapatch.streaming import Group, RolloutBuffer, StreamingConfig
from megapatch.streaming._groups import Groups


def tag(group, version=0, committed=True, expected=None):
    found = {"group_id": group, "weight_version": version, "committed": committed}
    return found if expected is None else {**found, "expected_num_samples": expected}


def groups_of(samples, version=4, generations=1, **settings):
    config = StreamingConfig(generations_per_prompt=generations, **{"max_staleness": 1, **settings})
    return Groups(samples, config, version)


# ------------------------------------------------------------------------------------------ a reference
def some_samples(random):
    """Samples of a few groups in mixed order, most of them complete and committed, with versions about 5."""
    samples = []
    for group in range(random.randrange(6)):
        expected, version = random.choice([None, None, 1, 3]), random.randrange(2, 8)
        number = max(0, (expected or 2) + random.choice([0, 0, 0, 0, -1, 1]))
        for _ in range(number):
            committed = random.random() < 0.95
            own = None if not committed and random.random() < 0.5 else version + random.choice([0] * 9 + [-1, 1])
            samples.append(tag(group, own, committed, expected))
    random.shuffle(samples)
    return {f"sample {place}": one for place, one in enumerate(samples)}


def reasons(samples, group, version, max_staleness):
    """Why not: from the words of the docstring, one sample at a time."""
    ours = [one for one in samples.values() if one["group_id"] == group]
    versions = [one["weight_version"] for one in ours if one["weight_version"] is not None]
    return {
        "incomplete": len(ours) != max(one.get("expected_num_samples", 2) for one in ours),
        "not committed": not all(one["committed"] for one in ours),
        "too old": any(version - own > max_staleness for own in versions),
        "from the future": any(own > version for own in versions),
    }


def test_it_is_the_reference_of_two_thousand_buffers():
    seen = {"picked": 0, "evicted": 0, "nothing": 0, "tie": 0}
    for seed in range(2000):
        samples = some_samples(random.Random(seed))
        max_staleness = seed % 4
        before = {key: dict(one) for key, one in samples.items()}
        found = groups_of(samples, 5, 2, max_staleness=max_staleness)
        groups = list(dict.fromkeys(one["group_id"] for one in samples.values()))
        keys = {group: tuple(key for key, one in samples.items() if one["group_id"] == group) for group in groups}
        why = {group: reasons(samples, group, 5, max_staleness) for group in groups}

        def oldest(group, samples=samples, keys=keys):
            return min(samples[key]["weight_version"] for key in keys[group])

        eligible = [group for group in groups if not any(why[group].values())]  # in order of arrival
        best = min(eligible, key=oldest, default=None)
        expected = None if best is None else Group(best, keys[best], oldest(best))
        assert found.pick() == (expected, len(eligible)), seed
        evicted = [
            group
            for group in groups
            if why[group]["too old"]
            and not why[group]["not committed"]
            and len(keys[group]) >= max(samples[key].get("expected_num_samples", 2) for key in keys[group])
        ]
        assert [(one.group_id, one.keys) for one in found.too_old()] == [
            (group, keys[group]) for group in evicted
        ], seed
        counts = ", ".join(
            f"{sum(each[reason] for each in why.values())} {reason}"
            for reason in ("incomplete", "not committed", "too old", "from the future")
        )
        heads = f"{len(samples)} samples in {len(groups)} prompt groups, of which {len(eligible)} eligible"
        assert str(found) == f"{heads}, {counts}", seed
        assert samples == before
        seen["picked"] += best is not None
        seen["nothing"] += best is None and bool(groups)
        seen["evicted"] += bool(evicted)
        seen["tie"] += len({oldest(group) for group in eligible}) < len(eligible)
    assert min(seen.values()) > 100, seen


# ------------------------------------------------------------------------------------------ in words
@pytest.mark.parametrize(("pick", "order"), [("weight_fifo", "cab"), ("ready_first", "acb")])
def test_the_policies(pick, order):
    """Of two samples each: a is complete first, then c, then b; c is the oldest."""
    samples = {"b0": tag("b", 4), "a0": tag("a", 4), "a1": tag("a", 4)}
    samples |= {"c0": tag("c", 3), "c1": tag("c", 4), "b1": tag("b", 4)}
    samples |= {"d": tag("d", 3)}  # not complete
    if pick == "weight_fifo":
        order = "cba"  # of equals the first to arrive
    groups, found = groups_of(samples, generations=2, pick=pick), []
    while (best := groups.pick()[0]) is not None:
        found.append(best.group_id)
        groups.drop(best)
    assert "".join(found) == order


def test_a_sample_that_is_not_committed_needs_no_version():
    for own in ({"group_id": 0, "committed": False}, tag(0, 0, committed=None)):
        assert "1 not committed" in str(groups_of({"a": own}))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"group_id": None}, "sample 'a' has no group_id in its tag; expected the one of its prompt"),
        ({"group_id": ([1],)}, "sample 'a' has group_id=([1],) in its tag, which is not hashable"),
        ({"weight_version": None}, "sample 'a' is committed and has no weight_version in its tag; expected"),
        ({"weight_version": "4"}, "sample 'a' has weight_version='4' in its tag; expected a whole number"),
        ({"weight_version": 1.5}, "sample 'a' has weight_version=1.5 in its tag; expected a whole number"),
        ({"expected_num_samples": "2"}, "sample 'a' has expected_num_samples='2' in its tag; expected a whole"),
    ],
)
async def test_a_wrong_tag_is_refused_with_its_sample(wrong, told):
    one, world = {**tag(0, 4), **wrong}, World()
    with pytest.raises(MegapatchError, match=f"^{re.escape(told)}"):
        groups_of({"a": one})
    with pytest.raises(MegapatchError, match=f"^{re.escape(told)}"):
        await world.buffer.put("a", one, None)
    assert not len(world.buffer)


class Unsigned:
    """Whole, and good for nothing else: one of NumPy's would wrap around below 0."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_numbers_of_other_kinds_are_read_as_whole():
    samples = {key: tag("a", Unsigned(version), expected=Unsigned(2)) for key, version in ((0, 3), (1, 5))}
    assert groups_of(samples, 5, max_staleness=2).pick() == (Group("a", (0, 1), 3), 1)
    assert groups_of(samples, 5).too_old() == [Group("a", (0, 1), 3)]
    assert "1 from the future" in str(groups_of(samples))


# -------------------------------------------------------------------- samples whose tokens have several versions
def of(*runs, group="a"):
    return {"group_id": group, "weight_versions": list(runs)}


@pytest.mark.parametrize(
    ("runs", "oldest"),
    [([(3, 10)], 3), ([(2, 0), (3, 10), (5, 0)], 3), ([(2, 1), (4, 9)], 2), ([(4, 5), (2, 5), (3, 5)], 2)],
)
def test_the_version_that_counts(runs, oldest):
    assert groups_of({0: of(*runs)}, max_staleness=2).pick() == (Group("a", (0,), oldest), 1)


def test_a_group_is_as_old_as_its_oldest_token_and_as_new_as_its_newest():
    old, new = {0: of((4, 9)), 1: of((2, 1), (4, 1))}, {0: of((3, 99), (5, 1))}
    assert groups_of(old, generations=2).too_old() == [Group("a", (0, 1), 2)]
    assert groups_of(new).pick() == (None, 0)
    assert groups_of(new, 5, max_staleness=2).pick()[1] == 1


async def test_a_rollout_goes_on_across_syncs():
    """As docs/streaming.md has it: an engine ends a request early when it is paused."""
    world, runs = World(), []
    pump = world.pump(max_staleness=2)

    async def roll_out():
        async with pump.rollout("long"):
            for _ in range(3):
                await pump.rollouts_permitted()
                runs.append((world.generation_version, 10))
                await asyncio.sleep(10)
            await world.buffer.put("long", {"group_id": "long", "weight_versions": runs}, "long")

    rolling = asyncio.ensure_future(roll_out())
    for version in range(2):
        await asyncio.sleep(5)
        await world.put(f"short{version}", version=version)
        await pump.step()
        await asyncio.sleep(5)
    await rolling
    assert runs == [(0, 10), (1, 10), (2, 10)]
    await pump.step()
    assert world.trained == [["short0"], ["short1"], ["long"]]


@pytest.mark.parametrize("runs", [[], [(1,)], [(1, 0)], [("1", 2)], [(1.5, 2)], 7, "12", [(0, 1), (1, -1)]])
def test_what_are_no_versions_of_tokens(runs):
    told = r"^sample 'a' has weight_versions=.* in its tag; expected a list of pairs"
    with pytest.raises(MegapatchError, match=told):
        groups_of({"a": {"group_id": "a", "weight_versions": runs}})


# ------------------------------------------------------------------------ the buffer
A, B = Group("a", (0, 1), 0), Group("b", (2,), 0)


async def filled():
    buffer = RolloutBuffer()
    for key, group in enumerate("aab"):
        await buffer.put(key, tag(group), f"data {key}")
    return buffer


async def test_claim_give_back_clear():
    buffer = await filled()
    assert list(buffer.samples()) == [0, 1, 2]
    assert buffer.claim(A) == ["data 0", "data 1"]
    assert list(buffer.samples()) == [2]
    for _ in range(2):  # a reply may have been lost
        buffer.give_back([A])
        assert list(buffer.samples()) == [0, 1, 2]  # as they arrived
    buffer.claim(A)
    for _ in range(2):
        buffer.clear([A])
        buffer.give_back([A])
        assert list(buffer.samples()) == [2] and len(buffer) == 1
    with pytest.raises(MegapatchError, match="'a' is claimed already, or gone"):
        buffer.claim(A)
    await buffer.put(0, tag("a"), "again")  # the key of another sample now
    assert buffer.claim(Group("a", (0,), 0)) == ["again"]


@pytest.mark.parametrize("whole", [tag("a"), {"group_id": "a", "weight_version": 0}])
async def test_a_sample_is_replaced_until_it_is_committed(whole):
    buffer = RolloutBuffer()
    await buffer.put(0, tag("a", committed=False), "half")
    await buffer.put(0, whole, "whole")
    with pytest.raises(MegapatchError, match="committed sample of that key"):
        await buffer.put(0, tag("a"), "twice")
    assert buffer.claim(Group("a", (0,), 0)) == ["whole"]


async def test_a_claim_of_a_group_of_which_a_sample_is_claimed_takes_none():
    buffer = await filled()
    buffer.claim(B)
    with pytest.raises(MegapatchError, match=r"^claim\(\): prompt group 'ab' is claimed already, or gone$"):
        buffer.claim(Group("ab", (0, 1, 2), 0))
    assert list(buffer.samples()) == [0, 1]


async def test_a_tag_may_be_used_for_the_next_sample():
    buffer, one = RolloutBuffer(), tag("a")
    await buffer.put(0, one, None)
    one["group_id"] = "b"
    await buffer.put(1, one, None)
    assert [each["group_id"] for each in buffer.samples().values()] == ["a", "b"]


async def test_waiting_for_a_change():
    buffer = RolloutBuffer()
    seen = buffer.changes()
    waiting = [asyncio.ensure_future(buffer.wait_for_change(seen)) for _ in range(3)]
    await asyncio.sleep(1)
    waiting[0].cancel()
    await asyncio.sleep(1)
    assert not any(task.done() for task in waiting[1:])
    await buffer.put(0, tag("a"), None)
    assert await asyncio.gather(*waiting[1:]) == [True, True]
    assert await buffer.wait_for_change(seen)  # before it was asked
    seen = buffer.changes()
    waiting = asyncio.ensure_future(buffer.wait_for_change(seen))
    await asyncio.sleep(1)
    buffer.close()
    assert not await waiting
    assert not await buffer.wait_for_change(buffer.changes())
    with pytest.raises(MegapatchError, match=r"put\(3\): the buffer is closed"):
        await buffer.put(3, tag("c"), None)
