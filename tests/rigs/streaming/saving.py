"""A pump whose state is saved, and one that goes on from it."""

from __future__ import annotations

import asyncio
import pickle

from rigs.streaming.world import World


class SavingWorld(World):
    """A buffer elsewhere, which can save what it has."""

    async def state_dict(self):
        return await self.do("state", self.buffer.state_dict)

    async def load_state_dict(self, state):
        await self.do("load", lambda: self.buffer.load_state_dict(state))


async def saved(pump):
    """Return the pump's state as it comes back from a file."""
    return pickle.loads(pickle.dumps(await pump.state_dict()))


async def resumed(state, **settings):
    world = SavingWorld()
    pump = world.pump(**settings)
    return world, pump, await pump.load_state_dict(state)


async def roll_out(world, pump, group, seconds=0.0, **tag):
    async with pump.rollout(group):
        await asyncio.sleep(seconds)
        await world.put(group, version=world.generation_version, **tag)
