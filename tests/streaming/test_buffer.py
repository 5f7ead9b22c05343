"""The buffer in memory: what the pump relies on, and how it holds generation back."""

from __future__ import annotations

import asyncio

import pytest

from megapatch import MegapatchError
from megapatch.streaming import Group, RolloutBuffer


def tag(group, committed=True):
    return {"group_id": group, "weight_version": 0, "committed": committed}


A, B = Group("a", (0, 1), 0), Group("b", (2,), 0)


async def filled(**settings):
    buffer = RolloutBuffer(**settings)
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


async def test_a_sample_is_replaced_until_it_is_committed():
    buffer = RolloutBuffer()
    await buffer.put(0, tag("a", committed=False), "half")
    await buffer.put(0, tag("a"), "whole")
    with pytest.raises(MegapatchError, match="committed sample of that key"):
        await buffer.put(0, tag("a"), "twice")
    assert buffer.claim(Group("a", (0,), 0)) == ["whole"]


async def test_a_sample_is_committed_where_its_tag_does_not_say():
    buffer = RolloutBuffer()
    await buffer.put(0, {"group_id": "a", "weight_version": 0}, None)
    with pytest.raises(MegapatchError, match="committed sample of that key"):
        await buffer.put(0, tag("a"), None)


async def test_a_key_that_was_trained_on_can_come_again_from_newer_weights():
    buffer = await filled()
    buffer.claim(B)
    buffer.clear([B])
    await buffer.put(2, {**tag("b"), "weight_version": 1}, "again")
    assert 2 in buffer.samples() and buffer.claim(B) == ["again"]


async def test_a_late_duplicate_of_what_was_trained_on_is_ignored():
    buffer = await filled(max_prompt_groups=3, remembered_versions=2)
    buffer.claim(B)
    buffer.clear([B])
    await buffer.put(2, tag("b"), "late")
    await buffer.put(2, tag("b", committed=False) | {"weight_version": None}, "late, and half")
    assert list(buffer.samples()) == [0, 1] and buffer.late_duplicates == 2
    for version in (1, 2, 3):  # after which nobody could train on it
        group = Group(version, (version * 10,), version)
        await buffer.put(version * 10, {"group_id": version, "weight_version": version}, None)
        buffer.claim(group)
        buffer.clear([group])
    await buffer.put(2, tag("b"), "very late")
    assert 2 in buffer.samples() and len(buffer._trained) == 3


async def test_what_was_cleared_without_a_claim_can_come_again():
    """Its worker had died, say, and another one does it."""
    buffer = await filled()
    buffer.clear([B])
    await buffer.put(2, tag("b"), "again")
    assert buffer.claim(B) == ["again"]


async def test_a_claim_of_a_group_of_which_a_sample_is_claimed_takes_none():
    buffer = await filled()
    buffer.claim(B)
    with pytest.raises(MegapatchError, match=r"^claim\(\): prompt group 'ab' is claimed already, or gone$"):
        buffer.claim(Group("ab", (0, 1, 2), 0))
    assert list(buffer.samples()) == [0, 1]


async def test_give_back_all_undoes_all_claims_and_is_news():
    buffer = await filled()
    buffer.claim(A)
    buffer.claim(B)
    waiting = asyncio.ensure_future(buffer.wait_for_change(buffer.changes()))
    await asyncio.sleep(0)
    buffer.give_back_all()
    assert await waiting
    assert list(buffer.samples()) == [0, 1, 2]


@pytest.mark.parametrize(
    "wrong",
    [{"group_id": None}, {"weight_version": None}, {"weight_version": "0"}, {"expected_num_samples": 1.5}],
    ids=str,
)
async def test_a_tag_that_cannot_be_read_is_refused_at_once(wrong):
    buffer = await filled()
    with pytest.raises(MegapatchError, match="sample 'bad' "):
        await buffer.put("bad", {**tag("c"), **wrong}, None)
    assert len(buffer) == len(buffer.samples()) == 3


async def test_a_tag_may_be_used_for_the_next_sample():
    buffer, one = RolloutBuffer(), tag("a")
    await buffer.put(0, one, None)
    one["group_id"] = "b"
    await buffer.put(1, one, None)
    assert [each["group_id"] for each in buffer.samples().values()] == ["a", "b"]


async def test_a_key_that_moves_to_another_group_leaves_the_place_of_its_old_one():
    buffer = RolloutBuffer(max_prompt_groups=2)
    await buffer.put(0, tag("a", committed=False), None)
    await buffer.put(0, tag("b", committed=False), None)
    await asyncio.wait_for(buffer.put(1, tag("c"), None), timeout=1)
    await asyncio.wait_for(buffer.put(0, tag("d"), None), timeout=1)  # into the place that it leaves
    buffer.clear([Group("d", (0,), 0), Group("c", (1,), 0)])
    for group in "ef":
        await asyncio.wait_for(buffer.put(group, tag(group), None), timeout=1)


async def test_a_tag_is_taken_as_it_was_when_put_was_called():
    buffer = await filled(max_prompt_groups=2)
    given = tag("c")
    putting = asyncio.ensure_future(buffer.put(3, given, None))
    await asyncio.sleep(1)
    given["group_id"] = "d"
    buffer.clear([A])
    await putting
    assert buffer.samples()[3] == tag("c")


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


async def test_a_full_buffer_holds_back_other_groups_until_one_is_claimed():
    buffer = await filled(max_prompt_groups=2)
    await buffer.put(3, tag("b"), None)  # goes on with one that is in
    putting = asyncio.ensure_future(buffer.put(4, tag("c"), None))
    await asyncio.sleep(1)
    buffer.claim(Group("a", (0,), 0))
    await asyncio.sleep(1)
    assert not putting.done()  # the other half of that group waits
    buffer.claim(Group("a", (1,), 0))
    await putting
    assert list(buffer.samples()) == [2, 3, 4]
    buffer.give_back([A])  # which may be one too many, for a while
    putting = asyncio.ensure_future(buffer.put(5, tag("d"), None))
    await asyncio.sleep(1)
    buffer.clear([A])
    await asyncio.sleep(1)
    assert not putting.done()
    buffer.clear([B])
    await asyncio.sleep(1)
    assert not putting.done()  # b had two samples
    buffer.clear([Group("b", (3,), 0)])
    await putting


async def test_a_closed_buffer():
    buffer = await filled(max_prompt_groups=2)
    putting = asyncio.ensure_future(buffer.put(3, tag("c"), None))
    await asyncio.sleep(1)
    buffer.close()
    with pytest.raises(MegapatchError, match=r"put\(3\): the buffer is closed"):
        await putting
    assert list(buffer.samples()) == [0, 1, 2]
