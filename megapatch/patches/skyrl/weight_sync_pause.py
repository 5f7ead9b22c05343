"""SkyRL pauses generation while weights are synced.

Symptom   WorkerDispatch.save_weights_for_sampler() broadcasts new weights to inference engines on their own GPUs
          while these serve requests: a request in flight is silently computed with old and new weights.
Upstream  fixed by NovaSky-AI/SkyRL#1212, in all releases of skyrl. skyrl-train up to 0.3.1 has no WorkerDispatch;
          checkouts from 2026-01-22 to 2026-03-01, such as the tag skyrl_train-v0.4.0, have the defect.
Seam      the class attribute. The broadcast inside is synchronous, so the pause cannot be placed there. Unless
          trainer and engines share their GPUs, megapatch.weight_sync.paused_generation pauses generation before
          the original and resumes it afterwards, even after an exception. If the caller has paused generation it
          stays paused, and engines that cannot pause are synced as before, with one warning.
Limits    after a failed sync generation is resumed, as upstream does, and an ERROR says that engines may
          hold a mixture of old and new weights: sync again before using samples.
          If the pause fails, its exception is raised and nothing is synced.
          Requests to /completions and batched generate() that arrive in a pause are refused by these clients.
Numbers   change in answers to requests that are in flight during a sync.
Cost      the time of the client's pause. InferenceEngineClient waits for five seconds
          (ABORT_GENERATION_GRACE_PERIOD_SECONDS) in each, even where nothing is in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from ..._pausing.generation import PAUSE, RESUME
from ..._python.dotted import find
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from ...weight_sync import paused_generation
from .._diagnosis import expect_none, gone, in_finally, reads_in_order, unmet

MODULES = ("skyrl_train.workers.worker_dispatch", "skyrl.backends.skyrl_train.workers.worker_dispatch")
DISPATCH = "WorkerDispatch"
SAVE = "save_weights_for_sampler"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real coroutine: running it needs actors and engines."""
    save = find(module, f"{DISPATCH}.{SAVE}")
    if save is None:
        return gone(f"{DISPATCH}.{SAVE}", module)
    calls = reads_in_order(save, PAUSE, RESUME)
    if not calls:
        expect_none(
            *unmet.names(
                f"{module.__name__}:{DISPATCH}.{SAVE}",
                "_inference_engine_client",
                "colocate_all",
                "broadcast_to_inference_engines",
            )
        )
        return Verdict(NEEDED, "weights are synced while engines serve requests")
    if in_finally(save, RESUME, branches=calls.count(PAUSE)):
        return Verdict(FIXED, f"{SAVE}() pauses generation, and resumes it even after a failure")
    return Verdict(
        UNKNOWN,
        f"expected {SAVE}() to resume generation even after a failure, or not to pause it; "
        f"found {', '.join(calls)}",
    )


def pause_while_syncing(save: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(save)
    async def patched_save_weights_for_sampler(self: Any, *args: Any, **kwargs: Any) -> None:
        client = self._inference_engine_client
        if self.colocate_all or client is None:  # without a client the original raises
            return await save(self, *args, **kwargs)
        async with paused_generation(client):
            return await save(self, *args, **kwargs)

    return patched_save_weights_for_sampler


PATCH = Patch(
    name="skyrl.weight-sync-pause",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1212",
    sites=tuple(Site(module, diagnose, replace={f"{DISPATCH}.{SAVE}": pause_while_syncing}) for module in MODULES),
    changes_numbers=True,
)
