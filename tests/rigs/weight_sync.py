"""A client whose pause, weight sync and resume fail or are cancelled at any of their await points."""

import asyncio
import threading

from megapatch.weight_sync import paused_generation

PLACES = [f"{call}, {when}" for call in ("pause", "body", "resume") for when in ("first", "last")]


class Failure(Exception):
    """The text is the place where it was raised."""


class World:
    """Engines, the client's functions, and a plan of what happens at their await points."""

    def __init__(self, plan=(), paused=False, event=True):
        self.plan = dict(zip(PLACES, plan, strict=False))
        self.paused = paused  # of the engines; a client without an event leaves some of them paused when it fails
        self.calls, self.failed, self.cancelled = [], [], []
        if event:
            self.generation_paused_event = threading.Event()
            if paused:
                self.generation_paused_event.set()

    async def point(self, place):
        deed = self.plan.get(place)
        if deed == "raise":
            self.fail(place)
        if deed == "cancel":
            self.cancelled.append(place)
            self.task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # a cancellation of the task that waits for this one takes a turn more

    def fail(self, place):
        self.failed.append(place)
        raise Failure(place)

    def mark(self, paused):
        self.paused = paused
        if event := getattr(self, "generation_paused_event", None):
            event.set() if paused else event.clear()

    async def pause_generation(self):
        self.calls.append("pause")
        self.mark(paused=True)
        await self.point("pause, first")
        await self.point("pause, last")

    async def body(self):
        self.calls.append("body")
        await self.point("body, first")
        await self.point("body, last")

    async def resume_generation(self):
        self.calls.append("resume")
        await self.point("resume, first")
        self.mark(paused=False)
        await self.point("resume, last")

    async def bracket(self):
        self.task = asyncio.current_task()
        async with paused_generation(self) as self.told_paused:
            await self.body()

    async def raised(self):
        """Return the exception that the bracket raises, caught inside its task."""
        try:
            await self.bracket()
        except BaseException as error:
            return error
        return None


def bracket(pause, resume, body=lambda: None, how="async with"):
    """Sync between these two functions, by `with` or by `async with` in a loop of its own."""

    async def in_loop():
        async with paused_generation(None, pause=pause, resume=resume):
            body()

    if how == "async with":
        asyncio.run(in_loop())
    else:
        with paused_generation(None, pause=pause, resume=resume):
            body()
