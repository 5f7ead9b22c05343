"""What the patches around weight syncs say of code that is like SkyRL's and yet another."""

from __future__ import annotations

import importlib

import pytest

from megapatch.patches.skyrl import async_trainer_resume, pause_rollback, weight_sync_pause

NOTHING = "there = 'nothing'"
DISPATCH = """
class WorkerDispatch:
    async def save_weights_for_sampler(self):
        if self.colocate_all:
            return
{body}
"""
BROADCAST = "self.broadcast_to_inference_engines(self._inference_engine_client)"
PAUSE = "await self._inference_engine_client.pause_generation()"
RESUME = "await self._inference_engine_client.resume_generation()"
TRAINER = """
class FullyAsyncRayPPOTrainer:
    async def train(self):
{body}
    async def async_sync_policy_weights_to_inference_engines(self):
        await self.policy.broadcast(self.{client})
"""
SYNC = "await self.async_sync_policy_weights_to_inference_engines()"
CLIENT = """
class InferenceEngineClient:
    def __init__(self):
        self.generation_paused_event = Event()
    async def pause_generation(self):
        "May mention that resume_generation() is to clear it."
{body}
"""
LOOK = "if self.generation_paused_event.is_set(): raise RuntimeError"
SET = "self.generation_paused_event.set()"


def code(template, *lines, **names):
    return template.format(body="\n".join(f"        {line}" for line in lines), **names)


def in_finally(*lines, last):
    return ("try:", *(f"    {line}" for line in lines), "finally:", f"    {last}")


CASES = {
    "dispatch: none": (weight_sync_pause, NOTHING, "absent", "no WorkerDispatch"),
    "dispatch: no pause": (weight_sync_pause, code(DISPATCH, BROADCAST), "needed", "while engines serve"),
    "dispatch: fixed": (
        weight_sync_pause,
        code(DISPATCH, PAUSE, *in_finally(BROADCAST, last=RESUME)),
        "fixed",
        "even after a failure",
    ),
    # as in PR 1212 before its review
    "dispatch: no finally": (
        weight_sync_pause,
        code(DISPATCH, PAUSE, BROADCAST, RESUME),
        "unknown",
        "even after a failure",
    ),
    "dispatch: no resume": (
        weight_sync_pause,
        code(DISPATCH, PAUSE, BROADCAST),
        "unknown",
        "even after a failure",
    ),
    "dispatch: another": (weight_sync_pause, code(DISPATCH, "self.sync()"), "unknown", "_inference_engine_client"),
    "trainer: none": (async_trainer_resume, NOTHING, "absent", "no FullyAsyncRayPPOTrainer"),
    "trainer: no finally": (
        async_trainer_resume,
        code(TRAINER, SYNC, PAUSE, SYNC, RESUME, client="inference_engine_client"),
        "needed",
        "does not resume",
    ),
    "trainer: finally": (
        async_trainer_resume,
        code(TRAINER, SYNC, PAUSE, *in_finally(SYNC, last=RESUME), client="inference_engine_client"),
        "unknown",
        "expected train() to use",
    ),
    "trainer: no first sync": (
        async_trainer_resume,
        code(TRAINER, PAUSE, SYNC, RESUME, client="inference_engine_client"),
        "unknown",
        "expected train() to use",
    ),
    "trainer: no such client": (
        async_trainer_resume,
        code(TRAINER, SYNC, PAUSE, SYNC, RESUME, client="engines"),
        "unknown",
        "inference_engine_client",
    ),
    "trainer: by the dispatch": (
        async_trainer_resume,
        code(TRAINER, "await self.dispatch.save_weights_for_sampler()", client="engines"),
        "fixed",
        "WorkerDispatch",
    ),
    "trainer: by something else": (
        async_trainer_resume,
        code(TRAINER, "await self.sync()", client="engines"),
        "unknown",
        "found none",
    ),
    "client: none": (pause_rollback, NOTHING, "absent", "no InferenceEngineClient.pause_generation"),
    "client: set for good": (pause_rollback, code(CLIENT, LOOK, SET, "await abort()"), "needed", "leaves"),
    "client: taken back": (
        pause_rollback,
        code(
            CLIENT,
            LOOK,
            SET,
            "try: await abort()",
            "except BaseException: self.generation_paused_event.clear(); raise",
        ),
        "fixed",
        "clears its own mark",
    ),
    "client: another": (pause_rollback, code(CLIENT, "await self.lock()"), "unknown", "found none"),
    "client: no mark": (
        pause_rollback,
        code(CLIENT, "await abort()").replace("self.generation_paused_event = Event()", "pass"),
        "absent",
        "does not mark itself",
    ),
}


@pytest.mark.parametrize(("patch", "source", "kind", "words"), CASES.values(), ids=CASES)
def test_the_verdict(patch, source, kind, words, modules):
    verdict = patch.diagnose(importlib.import_module(modules.write(source)))
    assert verdict.kind.value == kind
    assert words in verdict.reason
