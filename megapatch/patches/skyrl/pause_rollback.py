"""A failed pause of SkyRL's inference engines does not leave the client marked as paused.

Symptom   InferenceEngineClient.pause_generation() sets generation_paused_event, waits, and asks every engine to
          abort its requests. If an engine fails or cannot do so, or the call is cancelled meanwhile, the event
          stays set: requests wait forever, and the next pause fails on "Generation is already paused, cannot
          pause again."
Upstream  not reported; in skyrl-train 0.3.0 and 0.3.1 and in skyrl 0.1.0, where the pause that
          NovaSky-AI/SkyRL#1212 added to weight syncs stands before its `try`. In skyrl 0.2.0 the client no longer
          has such an event.
Seam      the class attribute: an exception in the original clears the event if the original set it. If the
          caller had already paused generation, it stays paused.
Limits    requests aborted before the failure stay aborted; the client continues them, as after a resume.
          Clients without an event are left alone: the InferenceEngineClient of skyrl 0.2.0 and every
          RemoteInferenceClient. They ask the engines, some of which may have paused when another one fails; no
          later pause fails because of that, but nobody knows who had paused an engine before, so the caller has to
          resume, as megapatch.weight_sync.paused_generation does.
Cost      once a pause, a look at the event.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from ..._pausing.generation import EVENT, PAUSE, RESUME
from ...patch import ABSENT, FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import expect_none, gone, reads_in_order, unmet

MODULES = (
    "skyrl_train.inference_engines.inference_engine_client",
    "skyrl.backends.skyrl_train.inference_engines.inference_engine_client",
)
CLIENT = "InferenceEngineClient"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real coroutine: a pause waits for seconds and needs engines."""
    client = getattr(module, CLIENT, None)
    pause = getattr(client, PAUSE, None)
    no_event = unmet.names(f"{module.__name__}:{CLIENT}.__init__", EVENT)
    if pause is None:
        if client is None or not no_event or hasattr(client, RESUME):
            return gone(f"{CLIENT}.{PAUSE}", module)
        return Verdict(ABSENT, f"this version has no {CLIENT}.{PAUSE}()")
    if no_event:
        if reads_in_order(pause, "is_set", "set"):
            expect_none(*no_event)
        return Verdict(ABSENT, f"the client does not mark itself as paused: it has no {EVENT}")
    found = reads_in_order(pause, EVENT, "is_set", "set", "clear", RESUME)
    if found == [EVENT, "is_set", EVENT, "set"]:
        return Verdict(NEEDED, f"a {PAUSE}() that fails leaves {EVENT} set")
    if "clear" in found or RESUME in found:
        return Verdict(FIXED, f"{PAUSE}() clears its own mark")
    return Verdict(
        UNKNOWN, f"expected {PAUSE}() to look at {EVENT} and to set it; found {', '.join(found) or 'none'}"
    )


def clear_mark_on_failure(pause: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(pause)
    async def patched_pause_generation(self: Any, *args: Any, **kwargs: Any) -> None:
        event: Any = getattr(self, EVENT, None)
        is_ours = event is not None and not event.is_set()
        try:
            return await pause(self, *args, **kwargs)
        except BaseException:
            if is_ours:
                event.clear()
            raise

    return patched_pause_generation


PATCH = Patch(
    name="skyrl.pause-rollback",
    doc=__doc__,
    upstream=None,
    sites=tuple(
        Site(module, diagnose, replace={f"{CLIENT}.{PAUSE}": clear_mark_on_failure}) for module in MODULES
    ),
)
