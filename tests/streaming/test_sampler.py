"""Which group is picked, against a reference that tries them all; and what tags have to have."""

from __future__ import annotations

import asyncio
import random
import re

import pytest
from rigs.streaming.world import World

from megapatch import MegapatchError, MisuseError
from megapatch.streaming import Backlog, Group, StalenessSampler


def tag(group, version, committed=True, expected=None):
    found = {"group_id": group, "weight_version": version, "committed": committed}
    return found if expected is None else {**found, "expected_num_samples": expected}


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
        "uncommitted": not all(one["committed"] for one in ours),
        "too_old": any(version - own > max_staleness for own in versions),
        "from_the_future": any(own > version for own in versions),
    }


def test_it_is_the_reference_of_a_thousand_buffers():
    seen = {"picked": 0, "evicted": 0, "nothing": 0, "tie": 0}
    for seed in range(2000):
        samples = some_samples(random.Random(seed))
        max_staleness = seed % 4
        sampler = StalenessSampler(max_staleness, 2)
        before = {key: dict(one) for key, one in samples.items()}
        groups = list(dict.fromkeys(one["group_id"] for one in samples.values()))
        keys = {group: tuple(key for key, one in samples.items() if one["group_id"] == group) for group in groups}
        why = {group: reasons(samples, group, 5, max_staleness) for group in groups}

        def oldest(group, samples=samples, keys=keys):
            return min(samples[key]["weight_version"] for key in keys[group])

        best = None
        for group in groups:  # in order of arrival
            if not any(why[group].values()) and (best is None or oldest(group) > oldest(best)):
                best = group
        found = sampler.select_one_group(samples, 5)
        assert found == (None if best is None else Group(best, keys[best], oldest(best))), seed
        evicted = [
            group
            for group in groups
            if why[group]["too_old"]
            and not why[group]["uncommitted"]
            and len(keys[group]) >= max(samples[key].get("expected_num_samples", 2) for key in keys[group])
        ]
        assert [(one.group_id, one.keys) for one in sampler.evict(samples, 5)] == [
            (group, keys[group]) for group in evicted
        ], seed
        eligible = [group for group in groups if not any(why[group].values())]
        backlog = sampler.backlog(samples, 5)
        assert (backlog.samples, backlog.groups, backlog.eligible) == (len(samples), len(groups), len(eligible))
        for reason in ("incomplete", "uncommitted", "too_old", "from_the_future"):
            assert getattr(backlog, reason) == sum(each[reason] for each in why.values()), (seed, reason)
        assert samples == before
        seen["picked"] += best is not None
        seen["nothing"] += best is None and bool(groups)
        seen["evicted"] += bool(evicted)
        seen["tie"] += len({oldest(group) for group in eligible}) < len(eligible)
    assert min(seen.values()) > 100, seen


# ------------------------------------------------------------------------------------------ in words
def test_least_lag_first_then_arrival():
    samples = {name: tag(name, version) for name, version in (("old", 3), ("new", 4), ("later", 4))}
    sampler = StalenessSampler(5, 1)
    assert sampler.select_one_group(samples, 4) == Group("new", ("new",), 4)
    assert [group.group_id for group in sampler.eligible(samples, 4)] == ["new", "later", "old"]


def test_the_least_that_a_tag_has():
    samples = {"a": {"group_id": 0, "weight_version": 0}}
    assert StalenessSampler(0, 1).select_one_group(samples, 0) == Group(0, ("a",), 0)


def test_a_sample_that_is_not_committed_needs_no_version():
    assert StalenessSampler(0, 1).backlog({"a": {"group_id": 0, "committed": False}}, 0) == Backlog(
        1, 1, 0, 0, 1, 0, 0
    )


@pytest.mark.parametrize(
    ("tag", "missing"),
    [({"weight_version": 1}, "group_id"), ({"group_id": 1}, "weight_version")],
    ids=["group_id", "weight_version"],
)
def test_what_is_missing_is_named(tag, missing):
    with pytest.raises(MegapatchError, match=rf"sample 'a' .*no {missing}.*; expected"):
        StalenessSampler(0, 1).select_one_group({"a": tag}, 1)


def test_committed_is_no_where_it_is_none():
    assert StalenessSampler(0, 1).backlog({"a": tag("a", 0, committed=None)}, 0).uncommitted == 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"group_id": None}, "sample 'a' has no group_id in its tag; expected the one of its prompt"),
        ({"group_id": ([1],)}, "sample 'a' has group_id=([1],) in its tag, which is not hashable"),
        ({"weight_version": "4"}, "sample 'a' has weight_version='4' in its tag; expected a whole number"),
        ({"weight_version": 1.5}, "sample 'a' has weight_version=1.5 in its tag; expected a whole number"),
        ({"expected_num_samples": "2"}, "sample 'a' has expected_num_samples='2' in its tag; expected a whole"),
        ({"expected_num_samples": 1.5}, "sample 'a' has expected_num_samples=1.5 in its tag; expected a whole"),
    ],
)
def test_a_wrong_tag_is_told_with_its_sample(wrong, told):
    sampler, samples = StalenessSampler(0, 1), {"a": {**tag(0, 4), **wrong}}
    for ask in (sampler.select_one_group, sampler.eligible, sampler.evict, sampler.backlog):
        with pytest.raises(MegapatchError, match=f"^{re.escape(told)}"):
            ask(samples, 4)


class Unsigned:
    """Whole, and good for nothing else: one of NumPy's would wrap around below 0."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_numbers_of_other_kinds_are_read_as_whole():
    samples = {key: tag("a", Unsigned(version), expected=Unsigned(2)) for key, version in ((0, 3), (1, 5))}
    assert StalenessSampler(2, 1).select_one_group(samples, 5) == Group("a", (0, 1), 3)
    assert StalenessSampler(1, 1).evict(samples, 5) == [Group("a", (0, 1), 3)]
    assert StalenessSampler(2, 1).backlog(samples, 4).from_the_future == 1


# -------------------------------------------------------------------- samples whose tokens have several versions
def sampler(**settings):
    return StalenessSampler(**{"max_staleness": 1, "generations_per_prompt": 1, **settings})


def of(*runs, group="a"):
    return {"group_id": group, "weight_versions": list(runs)}


@pytest.mark.parametrize(
    ("runs", "oldest"),
    [([(3, 10)], 3), ([(2, 0), (3, 10), (5, 0)], 3), ([(2, 1), (4, 9)], 2), ([(4, 5), (2, 5), (3, 5)], 2)],
)
def test_the_version_that_counts(runs, oldest):
    (group,) = sampler(max_staleness=2).eligible({0: of(*runs)}, 4)
    assert group == Group("a", (0,), oldest)


def test_a_group_is_as_old_as_its_oldest_sample():
    samples = {0: of((4, 9)), 1: of((2, 1), (4, 1))}
    two = {"generations_per_prompt": 2, "max_staleness": 1}
    assert sampler(**two).evict(samples, 4) == [Group("a", (0, 1), 2)]


def test_its_newest_token_must_not_be_from_the_future():
    samples = {0: of((3, 99), (5, 1))}
    assert not sampler().eligible(samples, 4)
    assert sampler(max_staleness=2).eligible(samples, 5)


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


async def test_late_duplicates_are_known_by_their_oldest_token():
    world = World()
    pump = world.pump(version=1, max_staleness=1)
    await world.buffer.put("a", of((0, 1), (1, 1)), "a")
    await pump.step()
    await world.buffer.put("a", of((0, 2)), "a")
    assert world.buffer.late_duplicates == 1
    await world.buffer.put("a", of((1, 2)), "a")
    assert len(world.buffer) == 1


@pytest.mark.parametrize("runs", [[], [(1,)], [(1, 0)], [("1", 2)], [(1.5, 2)], 7, "12", [(0, 1), (1, -1)]])
def test_what_are_no_versions_of_tokens(runs):
    told = r"^sample 'a' has weight_versions=.* in its tag; expected a list of pairs"
    with pytest.raises(MisuseError, match=told):
        sampler().eligible({"a": {"group_id": "a", "weight_versions": runs}}, 1)
