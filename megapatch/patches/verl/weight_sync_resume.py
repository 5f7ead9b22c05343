"""A failed weight sync does not leave verl's rollout replicas aborted, asleep or without a KV cache.

Symptom   CheckpointEngineManager.update_weights() aborts all requests, takes the replicas' KV caches away, and
          gives both back at its end, outside of any `finally`. After an exception in between, such as of a
          transfer, a trainer that survives has replicas that never answer again.
Upstream  not reported; in 0.7.1 to 0.9.1 and on main. 0.6.1 has no such manager.
Seam      the class attribute, a coroutine behind verl's own @auto_await, which looks at the frame that calls it:
          the replacement is made by that decorator, too. While it runs, the replicas' own methods note their
          calls. After an exception all calls under way are awaited, and each replica gets back what was taken:
          its KV cache (in 0.7.1 it is woken up), then its requests. Nothing that the original has tried to give
          back itself is tried again.
Limits    after a failed sync replicas may hold a mixture of old and new weights, or differ from each other, and an
          ERROR says so: sync again before using samples. The process group of a failed transfer is left as it is.
          A replica whose KV cache cannot be given back is not asked to generate. Two syncs at the same time, which
          verl does not make, would note each other's calls. Nothing is done for the backend "naive", where
          trainer and replicas share their GPUs and the workers do all.
Cost      nothing that could be measured beside a weight sync.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable
from types import ModuleType
from typing import Any

from ..._pausing.generation import resumed_on_failure
from ..._pausing.waiting import attempt, tell_besides
from ..._python.dotted import find, temporarily_set
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import gone, in_finally, reads_in_order, unmet

MODULE = "verl.checkpoint_engine.base"
MANAGER = "CheckpointEngineManager"
UPDATE = "update_weights"
LAST = ("resume_generation", "resume_generation_replicas")
PAIRS = (
    ("release_kv_cache", "resume_kv_cache"),
    ("sleep", "wake_up"),
    ("abort_all_requests", "resume_generation"),
)
"""Methods of a replica that take something away, and give it back: in the order of giving back."""

_BEGUN, _FAILED, _DONE = "begun", "failed", "done"


def diagnose(module: ModuleType) -> Verdict:
    """Read the real coroutine: running it needs Ray and engines."""
    update = find(module, f"{MANAGER}.{UPDATE}")
    if update is None:
        return gone(f"{MANAGER}.{UPDATE}", module)
    coroutine = inspect.unwrap(unpatched(update))
    if not inspect.iscoroutinefunction(coroutine) or unmet.attributes(f"{module.__name__}:", "auto_await"):
        return Verdict(UNKNOWN, f"expected {UPDATE}() to be a coroutine behind @auto_await")
    if in_finally(coroutine, *LAST):
        return Verdict(FIXED, f"{UPDATE}() resumes the replicas even after a failure")
    if reads_in_order(coroutine, *LAST):
        return Verdict(NEEDED, f"after an exception {UPDATE}() does not resume the replicas")
    return Verdict(UNKNOWN, f"expected {UPDATE}() to resume the replicas' generation; found no such call")


class ReplicaCalls:
    """Notes the calls of replicas' methods while it is entered. To `resumed_on_failure` it is the client."""

    def __init__(self, replicas: Iterable[Any]) -> None:
        self._replicas = list(replicas)
        self._states: list[dict[str, str]] = [{} for _ in self._replicas]
        self._originals: list[dict[str, Callable[..., Awaitable[Any]]]] = [
            {name: getattr(replica, name) for pair in PAIRS for name in pair if hasattr(replica, name)}
            for replica in self._replicas
        ]
        self._under_way: set[Any] = set()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ReplicaCalls:
        for replica, originals, states in zip(self._replicas, self._originals, self._states, strict=True):
            noting = {name: self._noting(name, method, states) for name, method in originals.items()}
            self._stack.enter_context(temporarily_set(replica, **noting))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _noting(
        self, name: str, method: Callable[..., Awaitable[Any]], states: dict[str, str]
    ) -> Callable[..., Awaitable[Any]]:
        async def noted(*args: Any, **kwargs: Any) -> Any:
            import asyncio

            states[name] = _BEGUN
            call = asyncio.ensure_future(method(*args, **kwargs))
            self._under_way.add(call)
            try:
                result = await call
            except BaseException:
                states[name] = _FAILED
                raise
            states[name] = _DONE
            return result

        return noted

    async def resume_generation(self) -> None:
        """Give each replica back the cache and the requests that it has lost.

        Raises the first failure, when all have been tried.
        """
        import asyncio

        # gather() raises the first exception and leaves the other calls to themselves.
        await asyncio.gather(*self._under_way, return_exceptions=True)
        failures = await asyncio.gather(
            *(self._resume(*one) for one in zip(self._originals, self._states, strict=True))
        )
        found = [failure for failure in failures if failure is not None]
        for other in found[1:]:
            tell_besides("a rollout replica could not be resumed", other, found[0], "replica")
        if found:
            raise found[0]

    async def _resume(
        self, methods: dict[str, Callable[..., Awaitable[Any]]], states: dict[str, str]
    ) -> Exception | None:
        failed = None
        for take, give in PAIRS:
            if take not in states or states.get(give) == _DONE:
                continue
            if states.get(give) == _FAILED:  # the original has tried: its failure is being raised
                return failed
            failure, _ = await attempt(methods[give], f"{give}()")
            if failure is not None:
                failed = failed or failure
                if states[take] == _DONE:  # it has really lost that
                    return failed
        return failed


def resume_after_failure(update_weights: Callable[..., Any]) -> Callable[..., Any]:
    coroutine = inspect.unwrap(update_weights)
    auto_await = coroutine.__globals__["auto_await"]

    @functools.wraps(coroutine)
    async def patched_update_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        with ReplicaCalls(self.replicas) as calls:
            async with resumed_on_failure(calls):
                return await coroutine(self, *args, **kwargs)

    replacement: Callable[..., Any] = functools.wraps(update_weights)(auto_await(patched_update_weights))
    return replacement


PATCH = Patch(
    name="verl.weight-sync-resume",
    doc=__doc__,
    upstream=None,
    sites=(Site(MODULE, diagnose, replace={f"{MANAGER}.{UPDATE}": resume_after_failure}),),
)
