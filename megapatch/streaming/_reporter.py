"""Report the pump's steps to a logger: TrainPump makes all calls here."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from .._troubleshooting import see
from ._calls import failure_of, perform

log = logging.getLogger("megapatch")


PATIENCE = 60.0
"""Seconds that a call of an asyncio or Ray logger may take."""


class Logger(Protocol):
    """Takes the pump's metrics.

    The method may be plain (it runs in the event loop, so it has to be quick), a coroutine function, or a method
    of a Ray actor's handle.
    """

    def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str) -> object:
        """Log the metrics of an optimizer step.

        Args:
            metrics: values by name, with prefix "timing/train" in seconds.
            step: the version, which counts optimizer steps.
            prefix: "train", "streaming" or "timing/train".
        """


class Reporter:
    """Passes metrics on. The first failure is logged with its traceback; none of them stops training."""

    def __init__(self, logger: Logger | None) -> None:
        self._logger = logger
        self._warned = False

    async def log_metrics(self, result: Any, step: int, prefix: str) -> None:
        """Log the result of a step, which is ignored if it is neither a mapping nor a dataclass."""
        logger = self._logger
        if logger is None:
            return
        try:
            if metrics := as_metrics(result):
                await self._pass_on(logger, metrics, step, prefix)
        except Exception:
            if not self._warned:
                self._warned = True
                log.exception(
                    "a logger failed; training continues, and further failures are not logged" + see("logger")
                )

    async def _pass_on(self, logger: Logger, metrics: dict[str, Any], step: int, prefix: str) -> None:
        call = asyncio.ensure_future(perform(logger.log_metrics, metrics, step=step, prefix=prefix, data=True))
        call.add_done_callback(failure_of)  # so that asyncio does not report a failure nobody has asked for
        try:
            await asyncio.wait([call], timeout=PATIENCE)
            if not call.done():
                self._logger = None
                raise TimeoutError(f"log_metrics() took more than {PATIENCE:g} seconds; it is not called again")
            if call.cancelled():
                raise RuntimeError("log_metrics() was cancelled")
            call.result()
        finally:
            call.cancel()


def as_metrics(result: Any) -> dict[str, Any]:
    """Return the values of a mapping or a dataclass by name, and an empty dictionary for anything else."""
    if isinstance(result, Mapping):
        return {str(name): value for name, value in result.items()}
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {}
