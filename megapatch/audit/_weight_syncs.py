"""weights-synced, resumed: a weight sync sends what was trained, and generation does not stay paused after it.

Watches   the resume in megapatch.weight_sync, which TrainPump and all patches use; and pausing, resuming and
          weight syncs in SkyRL's clients and asynchronous trainer and in AReaL's engines, in the releases that
          have them (`sites`). Where one of them raises and the exception is survived, inference engines may
          never answer again, and training waits for rollouts without an error. If a failed sync has left
          generation paused, the audit looks again some seconds later, when findings are asked for, and when the
          audit or the process ends. Until then, the code that caught the exception may have resumed it.
          And each sync of slime's and miles' actor, in all releases, which knows the trained weights from a copy.
Limits    the process that pauses is watched. Engines that are asked by other means are not, nor verl's replicas,
          which each kind of engine pauses in its own way. No engine says which weights it has received.
Cost      nothing but a note in a weight sync; slime's reads the weights twice where another model is loaded.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from .._pausing.generation import EVENT, PAUSE, RESUME, is_paused
from ..patch import Site
from ._audit import Audit, Part
from ._findings import observes, user_code
from ._hashes import hash_of
from ._watching import RAISED, Watcher, after, around, before, site

_GRACE = 10.0
"""Seconds in which the code that catches the exception of a weight sync may resume generation."""
_SKYRL_CLIENTS = (
    ("skyrl_train.inference_engines.inference_engine_client", "InferenceEngineClient", "skyrl-train 0.2.0"),
    ("skyrl_train.inference_servers.remote_inference_client", "RemoteInferenceClient", None),
    ("skyrl.backends.skyrl_train.inference_engines.inference_engine_client", "InferenceEngineClient", None),
    ("skyrl.backends.skyrl_train.inference_servers.remote_inference_client", "RemoteInferenceClient", None),
)
"""Module, class, and the releases in which it cannot pause yet."""
_SKYRL_TRAINERS = (
    ("skyrl_train.fully_async_trainer", None),
    ("skyrl.train.fully_async_trainer", "skyrl from 0.3.0 on"),
)
"""Module, and the releases that sync in another class."""
_SKYRL_SYNC = "FullyAsyncRayPPOTrainer.async_sync_policy_weights_to_inference_engines"
_AREAL, _AREAL_SYNC = "RemoteInfEngine", "MegatronEngine.update_weights"
_SLIME_SYNC = "MegatronTrainRayActor.update_weights"


class WeightSyncs(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._paused: weakref.WeakSet[Any] = weakref.WeakSet()
        """Clients that have paused and not resumed; those that have an event are asked instead."""
        self._left: weakref.WeakKeyDictionary[Any, tuple[str, tuple[str, ...]]] = weakref.WeakKeyDictionary()
        """By client that a failure has left paused: the call that has failed, and where."""

    def sites(self) -> Iterator[Site]:
        pausing, resuming = around(self._is_left_paused, self._note_pause), after(self._note_resume)
        yield site(
            "megapatch._pausing.generation",
            {"resume_once": self.watch_resume_once},
            expected={"resume_once": ("resume", "error", "attempt")},
        )
        for module, client, lacking in _SKYRL_CLIENTS:
            yield site(module, {f"{client}.{PAUSE}": pausing, f"{client}.{RESUME}": resuming}, optional=lacking)
        for module, lacking in _SKYRL_TRAINERS:
            syncing = self.syncing("inference_engine_client", _SKYRL_SYNC)
            yield site(module, {_SKYRL_SYNC: syncing}, optional=lacking)
        engine = {f"{_AREAL}.pause_generation": pausing, f"{_AREAL}.continue_generation": resuming}
        yield site("areal.infra.remote_inf_engine", engine)
        syncing = self.syncing("rollout_engine._engine", _AREAL_SYNC)
        yield site("areal.engine.megatron_engine", {_AREAL_SYNC: syncing})
        for framework in ("slime", "miles"):
            sent = {_SLIME_SYNC: before(self._compare_with_copy)}
            yield site(f"{framework}.backends.megatron_utils.actor", sent)

    # ------------------------------------------------------------------------ events
    @observes
    def _note_pause(self, was_paused: bool | None, result: Any, client: Any, *_: Any, **__: Any) -> None:
        self.ledger.judged["resumed"] += 1
        if result is not RAISED:
            self._paused.add(client)
        elif not was_paused:
            self._leave(client, "a pause that failed")

    @observes
    def _note_resume(self, _: Any, client: Any, *__: Any, **___: Any) -> None:
        self._paused.discard(client)
        self._left.pop(client, None)

    def syncing(self, attribute: str, path: str) -> Watcher:
        """Watch a weight sync of an object that has the client in an attribute, given by its path."""
        client_of = operator.attrgetter(attribute)

        def end(_: None, result: Any, trainer: Any, *__: Any, **___: Any) -> None:
            if result is RAISED:
                self._note_failed_sync(client_of, trainer, path.rpartition(".")[2])

        return around(lambda *_, **__: None, end)

    @observes
    def _note_failed_sync(self, client_of: Callable[[Any], Any], trainer: Any, sync: str) -> None:
        self._leave(client_of(trainer), f"{type(trainer).__name__}.{sync}(), which failed")

    def watch_resume_once(self, resume_once: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        @functools.wraps(resume_once)
        async def patched_resume_once(resume: Any, error: Any, attempt: Any) -> None:
            async def noted(call: Any, what: str) -> Any:
                outcome = await attempt(call, what)
                self._note_attempt(outcome)
                return outcome

            await resume_once(resume, error, noted)

        return patched_resume_once

    @observes
    def _note_attempt(self, outcome: tuple[Exception | None, object]) -> None:
        failure, _ = outcome
        self.ledger.judged["resumed"] += 1
        if failure is not None:
            what = f"resuming generation after a weight sync has failed: {type(failure).__name__}: {failure}"
            self.ledger.report("resumed", "resume", what)

    # ------------------------------------------------------------------------ left paused
    @observes
    def _is_left_paused(self, client: Any, *_: Any, **__: Any) -> bool:
        return is_paused(client) if getattr(client, EVENT, None) is not None else client in self._paused

    def _leave(self, client: Any, what: str) -> None:
        if self._is_left_paused(client):
            self._left[client] = (what, user_code())
            timer = threading.Timer(_GRACE, self.judge)
            timer.daemon = True
            timer.start()

    def judge(self) -> None:
        """Report generation that is still paused after a failure."""
        while self._left:
            client, (what, where) = self._left.popitem()
            if self._is_left_paused(client):
                self.ledger.report("resumed", "left", f"generation is still paused after {what}", where)

    # ------------------------------------------------------------------------ weights that are sent
    @observes
    def _compare_with_copy(self, actor: Any, *_: Any, **__: Any) -> None:
        """Compare the weights that are sent with the copy of the actor's, where another model was loaded last."""
        # Before there is a model, and where the copy itself is sent or loaded first, there is nothing to compare.
        loaded = getattr(actor, "_active_model_tag", "actor")
        if loaded == "actor" or actor.args.offload_train or actor.args.colocate:
            return
        backups = actor.weights_backuper
        self.ledger.judged["weights-synced"] += 1
        if _hashes(backups.get("actor").items()) != _hashes(backups._source_getter()):
            what = f"the weights of the model {loaded} are sent, not the actor's"
            self.ledger.report("weights-synced", "model", what)


def _hashes(tensors: Iterable[tuple[str, Any]]) -> dict[str, list[int]]:
    """Return by name a hash of each tensor; waits for a GPU once, at the end."""
    hashes = {name: hash_of([tensor]) for name, tensor in tensors}
    return {name: found.tolist() for name, found in hashes.items()}
