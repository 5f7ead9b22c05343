"""The calls that a weight sync has made of verl's rollout replicas, and those that have to undo them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ..._pausing.cancellation import tell_besides
from ..._pausing.waiting import attempt
from .._temporarily import temporarily_set

PAIRS = (
    ("release_kv_cache", "resume_kv_cache"),
    ("sleep", "wake_up"),
    ("abort_all_requests", "resume_generation"),
)
"""Methods of a replica that take something away, and give it back: in the order of giving back."""

_BEGUN, _FAILED, _DONE = "begun", "failed", "done"


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
