"""A failed weight update does not leave AReaL's rollout engines paused.

Symptom   both of MegatronEngine's weight updates pause generation, and let it continue at their end, outside of
          any `finally`. After an exception in between, a trainer that survives has rollout servers that never
          answer again. After one in a broadcast the lock of all trainers is still held, so that the next update
          waits for ever.
Upstream  not reported; in 1.0.4.
Seam      class attributes. update_weights() wraps both kinds: while it runs, the rollout engine's own methods
          note whether generation was paused. After an exception the rank that paused it lets it continue, unless
          the original has tried itself. _update_bucket_weights_from_distributed() releases the lock that it has
          taken.
Limits    after a failed update engines may hold a mixture of old and new weights, and an ERROR says so: update
          again before using samples. After an exception on another rank than the first, the first one waits in a
          barrier until its timeout, and resumes then. Not AReaL's FSDPEngine.
Cost      nothing that could be measured beside a weight update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._pausing.blocking import attempt_and_block
from ..._pausing.generation import log_failed_sync
from ..._pausing.waiting import tell_besides
from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import expect_none, in_finally, reads_in_order, resolve, unmet

MODULE = "areal.engine.megatron_engine"
ENGINE = "MegatronEngine"
UPDATES = ("_update_weights_from_distributed", "_update_weights_from_disk")
BUCKET = "_update_bucket_weights_from_distributed"
PAUSE, CONTINUE = "pause_generation", "continue_generation"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real methods: running them needs rollout engines."""
    path = f"{module.__name__}:{ENGINE}"
    expect_none(
        *unmet.attributes(path, *UPDATES),
        *unmet.names(f"{path}.update_weights", *UPDATES),
        *unmet.names(f"{path}.{BUCKET}", "engine_lock", "acquire", "release"),
    )
    updates = [resolve(f"{path}.{name}") for name in UPDATES]
    if all(reads_in_order(update, PAUSE, CONTINUE) == [PAUSE, CONTINUE] for update in updates):
        return Verdict(NEEDED, "after an exception in a weight update generation does not continue")
    if all(in_finally(update, CONTINUE) for update in updates):
        return Verdict(FIXED, "generation continues even after a failed weight update")
    return Verdict(UNKNOWN, f"expected {' and '.join(UPDATES)} to use {PAUSE}, then {CONTINUE}")


class _Noted:
    """Whether generation was paused, and whether it was let continue, by calls of a rollout engine's methods."""

    def __init__(self, rollout_engine: Any) -> None:
        self._pause, self._continue = getattr(rollout_engine, PAUSE), getattr(rollout_engine, CONTINUE)
        self._paused = False

    def pause_generation(self, *args: Any, **kwargs: Any) -> Any:
        self._paused = True
        return self._pause(*args, **kwargs)

    def continue_generation(self, *args: Any, **kwargs: Any) -> Any:
        self._paused = False
        return self._continue(*args, **kwargs)

    def resume_after(self, error: BaseException) -> None:
        log_failed_sync(error)
        if self._paused:
            failure = attempt_and_block(self._continue, f"{CONTINUE}()")
            if failure is not None:
                tell_besides("generation could not be resumed", failure, error, "not-resumed")


def resume_after_failure(update_weights: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update_weights)
    def patched_update_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        rollout_engine = self.rollout_engine
        if rollout_engine is None:
            return update_weights(self, *args, **kwargs)
        noted = _Noted(rollout_engine)
        methods = {PAUSE: noted.pause_generation, CONTINUE: noted.continue_generation}
        try:
            with temporarily_set(rollout_engine, **methods):
                return update_weights(self, *args, **kwargs)
        except BaseException as error:
            noted.resume_after(error)
            raise

    return patched_update_weights


def release_lock_after_failure(update_bucket: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update_bucket)
    def patched_update_bucket(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return update_bucket(self, *args, **kwargs)
        except BaseException as error:
            if self.engine_lock.token is not None:  # DistributedLock, as of 1.0.4: set while this process holds it
                failure = attempt_and_block(self.engine_lock.release, "release()")
                if failure is not None:
                    tell_besides("the lock of weight updates could not be released", failure, error, "lock")
            raise

    return patched_update_bucket


PATCH = Patch(
    name="areal.weight-sync-resume",
    doc=__doc__,
    upstream=None,
    sites=(
        Site(
            MODULE,
            diagnose,
            replace={
                f"{ENGINE}.update_weights": resume_after_failure,
                f"{ENGINE}.{BUCKET}": release_lock_after_failure,
            },
        ),
    ),
)
