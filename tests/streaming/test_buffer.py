"""The buffer in memory: what the pump relies on."""

from __future__ import annotations

import asyncio

import pytest

from megapatch import MegapatchError
from megapatch.streaming import Group, RolloutBuffer


def tag(group, committed=True):
    return {"group_id": group, "weight_version": 0, "committed": committed}


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
