"""A pump's index of groups, kept by updates, against one that is made from all samples."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from rigs.streaming.world import World, raised

from megapatch import MisuseError
from megapatch.streaming import Group, RolloutBuffer, StalenessSampler
from megapatch.streaming._groups import Groups, Orphans
from megapatch.streaming._tags import read_tag

GENERATIONS, MAX_STALENESS = 2, 2


class Mirror:
    """An index that is kept by a buffer's updates."""

    def __init__(self, buffer, pick="windowed"):
        self.buffer, self.position = buffer, -1
        self.groups = Groups(MAX_STALENESS, GENERATIONS, 0, pick)

    def update(self):
        updates = self.buffer.updates(self.position)
        if updates.is_complete:
            self.groups.reset()
        for key, number, tag in updates.samples:
            if tag is None:
                self.groups.drop(key)
            else:
                self.groups.add(key, number, read_tag(key, tag))
        self.position = updates.position


async def change(buffer, chance, version, claimed):
    """Do something to the buffer, as generation, a pump or somebody else may."""
    deed = chance.random()
    if deed < 0.7:
        key = chance.randrange(1000)
        tag = {
            "group_id": chance.randrange(40),
            "weight_version": version + chance.choice([-3, -2, -1, 0, 0, 0, 1]),
        }
        if chance.random() < 0.1:
            tag["expected_num_samples"] = chance.choice([1, 3])
        with contextlib.suppress(MisuseError):  # there is a committed one
            await buffer.put(key, {**tag, "committed": chance.random() < 0.8}, key)
    elif deed < 0.85:
        keys = chance.sample(list(buffer.samples()), min(len(buffer.samples()), chance.choice([1, 2, 3])))
        if keys:
            claimed.append(Group("some", tuple(keys), 0))
            buffer.claim(claimed[-1])
    elif claimed and deed < 0.9:
        buffer.give_back([claimed.pop()])
    elif claimed:
        buffer.clear([claimed.pop(0)])


@pytest.mark.parametrize("seed", range(4))
async def test_it_is_that_of_all_samples(seed):
    chance, buffer, claimed = random.Random(seed), RolloutBuffer(), []
    mirror, sampler = Mirror(buffer), StalenessSampler(MAX_STALENESS, GENERATIONS)
    seen = {"picked": 0, "evicted": 0}
    for number in range(1500):
        version = number // 75
        await change(buffer, chance, version, claimed)
        if chance.random() < 0.3:
            continue
        mirror.update()
        samples = buffer.samples()
        eligible, too_old = sampler.eligible(samples, version), sampler.evict(samples, version)
        assert mirror.groups.evict(version) == too_old
        buffer.clear(too_old)
        assert mirror.groups.pick() == (eligible[0] if eligible else None, len(eligible))
        assert mirror.groups.backlog() == sampler.backlog(buffer.samples(), version)
        if eligible and chance.random() < 0.2:
            claimed.append(eligible[0])
            buffer.claim(eligible[0])
            mirror.groups.drop_group(eligible[0])
        seen["picked"] += bool(eligible)
        seen["evicted"] += len(too_old)
    assert min(seen.values()) > 50, seen


@pytest.mark.parametrize(
    ("pick", "order"),
    [("windowed", "cbad"), ("weight_fifo", "adbc"), ("ready_first", "dbca")],
)
def test_the_policies(pick, order):
    groups = Groups(5, 1, 5, pick)
    for arrival, (group, version, expected) in enumerate([("a", 3, 2), ("d", 3, 1), ("b", 4, 1), ("c", 5, 1)]):
        groups.add(arrival, arrival, read_tag(0, {"group_id": group, "weight_version": version}))
        if expected == 2:
            groups.add("rest", 9, read_tag(0, {"group_id": group, "weight_version": 3, "expected_num_samples": 2}))
    found = []
    while (group := groups.pick()[0]) is not None:
        found.append(group.group_id)
        groups.drop_group(group)
    assert found == list(order)


# ------------------------------------------------------------------------------------------ updates
async def test_updates_are_what_has_changed():
    buffer = RolloutBuffer()
    for key in "abc":
        await buffer.put(key, {"group_id": key, "weight_version": 0}, key)
    first = buffer.updates(-1)
    assert first.is_complete and [(key, number) for key, number, _ in first.samples] == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
    ]
    group = Group("a", ("a",), 0)
    buffer.claim(group)
    await buffer.put("d", {"group_id": "d", "weight_version": 0}, "d")
    second = buffer.updates(first.position)
    assert not second.is_complete
    assert [(key, tag is None) for key, _, tag in second.samples] == [("a", True), ("d", False)]
    buffer.give_back([group])
    third = buffer.updates(second.position)
    assert [(key, number, tag is None) for key, number, tag in third.samples] == [("a", 0, False)]
    assert buffer.updates(third.position).samples == []
    assert buffer.updates(first.position).is_complete  # a position of long ago


async def test_updates_that_nobody_asks_for_are_not_kept():
    buffer = RolloutBuffer()
    position = buffer.updates(-1).position
    for key in range(1500):
        await buffer.put(key, {"group_id": key, "weight_version": 0}, None)
        buffer.clear([Group(key, (key,), 0)])
    assert buffer.updates(position).is_complete


class Updating(World):
    """Whose buffer has updates, and counts the samples in them."""

    def __init__(self, plan=None):
        super().__init__(plan)
        self.read = []

    async def updates(self, seen):
        found = await self.do("updates", lambda: self.buffer.updates(seen))
        self.read.append(len(found.samples))
        return found


async def test_a_pump_reads_only_what_has_changed():
    world = Updating()
    for name in range(1000):
        await world.put(f"later {name}", version=50)
    pump = world.pump()
    for step in range(3):
        await world.put(f"now {step}", version=step)
        await pump.step()
    assert "samples" not in world.calls
    assert world.read[0] == 1001 and all(number <= 3 for number in world.read[1:])


async def test_a_tag_that_cannot_be_read_is_told_each_time():
    world = Updating()
    await world.put("a")
    world.buffer._tags["a"] = {"group_id": "a"}
    pump = world.pump()
    for _ in range(2):
        error = await raised(asyncio.wait_for(pump.step(), 10))
        assert "'a' is committed and has no weight_version" in str(error)


def of_each_kind():
    """Groups of two: complete, too small, too large, and with a sample that is not committed."""
    groups = Groups(MAX_STALENESS, GENERATIONS, 0, "windowed")
    for key, group in enumerate(["complete", "complete", "small", "large", "large", "large", "open", "open"]):
        tag = {"group_id": group, "weight_version": 0, "committed": key != 7}
        groups.add(key, key, read_tag(key, tag))
    return groups


def test_what_is_complete_and_committed_is_whole():
    groups = of_each_kind()
    assert groups.whole("complete") == Group("complete", (0, 1), 0)
    assert [groups.whole(name) for name in ("small", "large", "open", "none")] == [None] * 4
    assert groups.in_part("small") == Group("small", (2,), 0)
    assert groups.in_part("complete") is groups.in_part("none") is None
    assert [group.group_id for group in groups.unsettled()] == ["small", "large", "open"]


def test_orphans_are_looked_for_when_it_is_time():
    groups, orphans = of_each_kind(), Orphans(100)
    assert orphans.found_in(groups, lambda group_id: False, now=0) == []
    assert [orphans.seconds_to_the_next_look(groups, now)[0] for now in (1, 24.5, 25, 30)] == [24, 0.5, 0, 0]
    assert orphans.found_in(groups, lambda group_id: False, now=99) == []
    assert orphans.found_in(groups, lambda group_id: False, now=101) == []  # the last look was 2 s ago
    assert [
        group.group_id for group in orphans.found_in(groups, lambda group_id: group_id == "open", now=124)
    ] == [
        "small",
        "large",
    ]
