"""Rollouts of a pump that end when a test says so."""

from __future__ import annotations

import asyncio

from .world import World


class Rollouts:
    """Rollouts of a pump that end when a test says so, and write down when they begin."""

    def __init__(self, world, pump):
        self.world, self.pump, self.begun, self.ends, self.tasks = world, pump, [], {}, {}

    def begin(self, *groups):
        for group in groups:
            self.ends[group] = asyncio.get_running_loop().create_future()
            self.tasks[group] = asyncio.ensure_future(self.roll_out(group))

    async def roll_out(self, group):
        async with self.pump.rollout(group):
            self.begun.append(group)
            version = self.world.generation_version
            if await self.ends[group] != "dropped":
                await self.world.put(group, version=version)

    async def end(self, *groups, how="put"):
        for group in groups:
            self.ends[group].set_result(how)
        await asyncio.sleep(1)


async def begun(world=None, groups="abcdefgh", **settings):
    world = world or World()
    pump = world.pump(**{"target_prompt_groups_per_step": 2, **settings})
    rollouts = Rollouts(world, pump)
    rollouts.begin(*groups)
    await asyncio.sleep(1)
    return world, pump, rollouts
