"""resumed: generation that was paused for a weight sync does not stay paused.

Symptom   a weight sync, or the pause or the resume around it, raises. Whoever survives that has inference engines
          that never answer again: training waits for rollouts, without an error.
Upstream  NovaSky-AI/SkyRL#1212, NovaSky-AI/SkyRL#1584.
Seam      what resumes in megapatch.weight_sync, which TrainPump and all patches use; pausing and resuming in
          SkyRL's client and AReaL's rollout engine, and their weight syncs. Generation that a failed sync has left
          paused is looked at again some seconds later, when findings are asked for, and when the process ends:
          until then, whoever caught the exception may have resumed it.
Limits    the process that pauses is watched. Engines that are asked by other means are not, nor verl's replicas,
          which each kind of engine pauses in its own way.
Cost      nothing but a note in a weight sync.
"""

from __future__ import annotations

import functools
import inspect
import operator
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from ..patch import Patch
from ..weight_sync._pause import EVENT, PAUSE, RESUME, is_paused
from ._findings import LEDGER, observes, user_code
from ._sites import site

_GRACE = 10.0
"""Seconds in which whoever catches the exception of a weight sync may resume generation."""
_paused: weakref.WeakSet[Any] = weakref.WeakSet()
"""Clients that have paused and not resumed; those that have an event are asked instead."""
_left: weakref.WeakKeyDictionary[Any, tuple[str, tuple[str, ...]]] = weakref.WeakKeyDictionary()
"""By client that a failure has left paused: what has failed, and where."""


def _around(
    function: Callable[..., Any], begin: Callable[..., Any], end: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the method, plain or a coroutine function, between begin(self) and end(self, begun, failed)."""
    if inspect.iscoroutinefunction(inspect.unwrap(function)):

        @functools.wraps(function)
        async def patched_coroutine(self: Any, *args: Any, **kwargs: Any) -> Any:
            begun, failed = begin(self), True
            try:
                result = await function(self, *args, **kwargs)
                failed = False
            finally:
                end(self, begun, failed)
            return result

        return patched_coroutine

    @functools.wraps(function)
    def patched_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun, failed = begin(self), True
        try:
            result = function(self, *args, **kwargs)
            failed = False
        finally:
            end(self, begun, failed)
        return result

    return patched_method


# ------------------------------------------------------------------------ what happens
def watch_pause(pause: Callable[..., Any]) -> Callable[..., Any]:
    return _around(pause, _is_left_paused, _note_pause)


@observes
def _note_pause(client: Any, was_paused: bool | None, failed: bool) -> None:
    if not failed:
        _paused.add(client)
    elif not was_paused:
        _leave(client, "a pause that failed")


def watch_resume(resume: Callable[..., Any]) -> Callable[..., Any]:
    return _around(resume, lambda client: None, _note_resume)


@observes
def _note_resume(client: Any, begun: None, failed: bool) -> None:
    if not failed:
        _paused.discard(client)
        _left.pop(client, None)


def watch_sync(attribute: str, sync: Callable[..., Any]) -> Callable[..., Any]:
    """Watch a weight sync of an object that has the client in an attribute, given by its path."""
    client_of = operator.attrgetter(attribute)

    @observes
    def note(trainer: Any, begun: None, failed: bool) -> None:
        if failed:
            _leave(client_of(trainer), f"{type(trainer).__name__}.{sync.__name__}(), which failed")

    return _around(sync, lambda trainer: None, note)


def watch_resume_once(resume_once: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(resume_once)
    async def patched_resume_once(resume: Any, error: Any, attempt: Any) -> None:
        async def noted(call: Any) -> Any:
            outcome = await attempt(call)
            _note_attempt(outcome)
            return outcome

        await resume_once(resume, error, noted)

    return patched_resume_once


@observes
def _note_attempt(outcome: tuple[Exception | None, object]) -> None:
    failure, _ = outcome
    if failure is not None:
        what = f"resuming generation after a weight sync has failed: {type(failure).__name__}: {failure}"
        LEDGER.report("resumed", "resume", what)


# ------------------------------------------------------------------------ who was left
@observes
def _is_left_paused(client: Any) -> bool:
    return is_paused(client) if getattr(client, EVENT, None) is not None else client in _paused


def _leave(client: Any, what: str) -> None:
    if _is_left_paused(client):
        _left[client] = (what, user_code())
        timer = threading.Timer(_GRACE, judge)
        timer.daemon = True
        timer.start()


@observes
def judge() -> None:
    """Report generation that is still paused after a failure."""
    while _left:
        client, (what, where) = _left.popitem()
        if _is_left_paused(client):
            LEDGER.report("resumed", "left", f"generation is still paused after {what}", where)


_SKYRL = ("skyrl_train", "skyrl.backends.skyrl_train")
_SKYRL_TRAINER = "FullyAsyncRayPPOTrainer.async_sync_policy_weights_to_inference_engines"
_AREAL = "RemoteInfEngine"

PATCH = Patch(
    name="audit.generation",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/pull/1212",
    sites=(
        site(
            "megapatch.weight_sync._pause",
            {"_resume_once": watch_resume_once},
            expected={"_resume_once": ("resume", "error", "attempt")},
        ),
        *(
            site(
                f"{package}.{module}",
                {f"{client}.{PAUSE}": watch_pause, f"{client}.{RESUME}": watch_resume},
                since=f"{client}.{PAUSE}",
            )
            for package in _SKYRL
            for module, client in (
                ("inference_engines.inference_engine_client", "InferenceEngineClient"),
                ("inference_servers.remote_inference_client", "RemoteInferenceClient"),
            )
        ),
        *(
            site(
                f"{package}.fully_async_trainer",
                {_SKYRL_TRAINER: functools.partial(watch_sync, "inference_engine_client")},
                since=_SKYRL_TRAINER,
            )
            for package in ("skyrl_train", "skyrl.train")
        ),
        site(
            "areal.infra.remote_inf_engine",
            {f"{_AREAL}.pause_generation": watch_pause, f"{_AREAL}.continue_generation": watch_resume},
        ),
        site(
            "areal.engine.megatron_engine",
            {"MegatronEngine.update_weights": functools.partial(watch_sync, "rollout_engine._engine")},
        ),
    ),
)
