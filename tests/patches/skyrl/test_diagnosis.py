"""Verdicts of the patches around weight syncs on code that is like SkyRL's and yet another."""

from rigs.diagnosed_sources import each_source

from megapatch.patches.skyrl import async_trainer_resume, pause_rollback, weight_sync_pause

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


def trainer(*lines, client="inference_engine_client"):
    return code(TRAINER, *lines, client=client)


TAKEN_BACK = ("try: await abort()", "except BaseException: self.generation_paused_event.clear(); raise")
BY_DISPATCH = "await self.dispatch.save_weights_for_sampler()"
ITS_SYNCS = "expected train() to use"
SOURCES = {
    weight_sync_pause.diagnose: {
        "dispatch: no pause": (code(DISPATCH, BROADCAST), "needed", "while engines serve"),
        "dispatch: fixed": (
            code(DISPATCH, PAUSE, *in_finally(BROADCAST, last=RESUME)),
            "fixed",
            "even after a failure",
        ),
        # as in PR 1212 before its review
        "dispatch: no finally": (code(DISPATCH, PAUSE, BROADCAST, RESUME), "unknown", "even after a failure"),
        "dispatch: no resume": (code(DISPATCH, PAUSE, BROADCAST), "unknown", "even after a failure"),
    },
    async_trainer_resume.diagnose: {
        "trainer: no finally": (trainer(SYNC, PAUSE, SYNC, RESUME), "needed", "does not resume"),
        "trainer: finally": (trainer(SYNC, PAUSE, *in_finally(SYNC, last=RESUME)), "unknown", ITS_SYNCS),
        "trainer: no first sync": (trainer(PAUSE, SYNC, RESUME), "unknown", ITS_SYNCS),
        "trainer: by the dispatch": (trainer(BY_DISPATCH, client="engines"), "fixed", "WorkerDispatch"),
    },
    pause_rollback.diagnose: {
        "client: set for good": (code(CLIENT, LOOK, SET, "await abort()"), "needed", "leaves"),
        "client: taken back": (code(CLIENT, LOOK, SET, *TAKEN_BACK), "fixed", "clears its own mark"),
        "client: no mark": (
            code(CLIENT, "await abort()").replace("self.generation_paused_event = Event()", "pass"),
            "absent",
            "does not mark itself",
        ),
    },
}
test_the_verdict = each_source(SOURCES)
