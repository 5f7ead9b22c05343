"""SkyRL's fully asynchronous trainer resumes generation after a failed weight sync.

Symptom   FullyAsyncRayPPOTrainer.train() pauses generation, syncs weights and resumes, without a `finally`. After
          a sync that raised or was cancelled, engines stay paused: requests wait forever, and the next pause
          fails on "Generation is already paused, cannot pause again."
Upstream  in skyrl-train 0.3.0 and 0.3.1 and in skyrl 0.1.0 and 0.2.0; NovaSky-AI/SkyRL#1584 (skyrl 0.3.0) leaves
          pausing to WorkerDispatch, which has a `finally`.
Seam      the class attributes of the trainer: its sync, and train(), which only counts the syncs, as nothing is
          paused for the first one. If a later one raises, generation is resumed once, since its exception keeps
          train() from doing so.
Limits    an ERROR says that engines may hold a mixture of old and new weights: sync again before using samples.
          If train()'s own pause or resume fails or is cancelled, that is not repaired here: for an
          InferenceEngineClient that marks itself as paused see skyrl.pause-rollback; others may be left with some
          engines paused. A subclass's own train() or sync that does not call this one is left alone, and so are
          syncs outside train().
Cost      nothing but a count.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from ..._pausing.generation import PAUSE, RESUME, resumed_on_failure
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import expect_none, gone, reads_in_order, unmet

MODULES = ("skyrl_train.fully_async_trainer", "skyrl.train.fully_async_trainer")
TRAINER = "FullyAsyncRayPPOTrainer"
SYNC = "async_sync_policy_weights_to_inference_engines"

_syncs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many syncs each trainer has begun in its current train()."""


def diagnose(module: ModuleType) -> Verdict:
    """Read the real coroutine: running it needs models, data and engines."""
    train = vars(getattr(module, TRAINER, object)).get("train")  # its own: the synchronous trainer's is another
    if train is None:
        return gone(f"{TRAINER}.train", module)
    found = reads_in_order(train, SYNC, PAUSE, RESUME)
    if not found and reads_in_order(train, "save_weights_for_sampler"):
        return Verdict(FIXED, "train() leaves pausing to WorkerDispatch")
    expected = [SYNC, PAUSE, SYNC, RESUME]
    if found != expected:
        return Verdict(
            UNKNOWN, f"expected train() to use {', '.join(expected)}; found {', '.join(found) or 'none'}"
        )
    expect_none(*unmet.names(f"{module.__name__}:{TRAINER}.{SYNC}", "inference_engine_client"))
    return Verdict(NEEDED, "train() does not resume generation after a failed sync")


def count_syncs(train: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(train)
    async def patched_train(self: Any, *args: Any, **kwargs: Any) -> None:
        _syncs[self] = 0
        try:
            return await train(self, *args, **kwargs)
        finally:
            _syncs.pop(self, None)

    return patched_train


def resume_after_failed_sync(sync: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(sync)
    async def patched_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        earlier = _syncs.get(self)
        if earlier is not None:
            _syncs[self] = earlier + 1
        if not earlier:  # the first one, or outside train()
            return await sync(self, *args, **kwargs)
        async with resumed_on_failure(self.inference_engine_client):
            return await sync(self, *args, **kwargs)

    return patched_sync


PATCH = Patch(
    name="skyrl.async-trainer-resume",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1584",
    sites=tuple(
        Site(
            module,
            diagnose,
            replace={f"{TRAINER}.train": count_syncs, f"{TRAINER}.{SYNC}": resume_after_failed_sync},
        )
        for module in MODULES
    ),
)
