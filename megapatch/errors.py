"""Every exception that megapatch raises on its own account.

All are under `MegapatchError`. A second base class says how the exception can be caught without knowing
megapatch: a misuse is a RuntimeError, a bad setting a ValueError, a wait that took too long a TimeoutError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "AuditError",
    "ConfigError",
    "EmptyStepError",
    "InconsistentError",
    "MegapatchError",
    "MisuseError",
    "RanksFailed",
    "RanksTimedOut",
    "RestoreError",
    "StrictError",
]


class MegapatchError(Exception):
    """Base class of every exception that megapatch raises on its own account."""


class MisuseError(MegapatchError, RuntimeError):
    """megapatch was called in a way, or at a moment, in which it cannot work."""


class RestoreError(MegapatchError):
    """A target could not be restored because someone has patched on top of megapatch."""


class StrictError(MegapatchError):
    """MEGAPATCH_STRICT is set and a patch is not in place; the message says which, why, and what to do.

    Not an ImportError, although an import raises it: code around optional imports would swallow that.
    """


class InconsistentError(MegapatchError):
    """Processes that have to be patched alike are not; the message says which differ in what."""


class AuditError(MegapatchError):
    """MEGAPATCH_AUDIT=raise is set, and a rank has broken a rule of training; the message says which, and how."""


class ConfigError(MegapatchError, ValueError):
    """A field of a StreamingConfig breaks a rule.

    Attributes:
        field: the field's name.
        value: the value that it has.
        rule: the values that are allowed, in words.
    """

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} is {value!r}; it has to be {rule}")
        self.field, self.value, self.rule = field, value, rule

    def __reduce__(self) -> tuple[Any, ...]:  # it may be raised in a Ray actor
        return type(self), (self.field, self.value, self.rule), self.__dict__


class EmptyStepError(MegapatchError, RuntimeError):
    """An optimizer step has too few prompt groups, and no more will come.

    Attributes:
        trained: prompt groups trained on so far; they were given back to the buffer.
        target: prompt groups that the step needs.
    """

    def __init__(self, *, trained: int, target: int, evicted: int, waiting: str) -> None:
        super().__init__(
            f"an optimizer step has {trained} of its {target} prompt groups, and no more will come: the buffer is "
            f"closed. {waiting}. Evicted as too old meanwhile: {evicted} prompt groups. Let generation go on, "
            "and see that samples bear the version of their weights; or ask for fewer groups a step, or allow a "
            "larger max_staleness"
        )
        self.trained, self.target = trained, target

    def __reduce__(self) -> tuple[Any, ...]:  # it may be raised in a Ray actor
        return BaseException.__new__, (type(self), *self.args), self.__dict__


class RanksTimedOut(MegapatchError, TimeoutError):
    """The ranks did not finish in time; the message names the late ones and shows where they were."""


class RanksFailed(MegapatchError, RuntimeError):
    """At least one rank raised or died.

    Attributes:
        failures: rank to the traceback's text, or to how the process ended; the first to fail comes first.
        waiting: rank to the stack's text, for the ranks that were still running and had to be ended.
    """

    def __init__(self, message: str, failures: Mapping[int, str], waiting: Mapping[int, str]) -> None:
        super().__init__(message)
        self.failures, self.waiting = dict(failures), dict(waiting)
