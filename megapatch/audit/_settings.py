"""How often the audit compares ranks, and whether a finding ends training."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

from .._engine.settings import EVERY
from ..errors import MisuseError

log = logging.getLogger("megapatch")

_DEFAULT = 50
_EXPECTED = "expected a number of steps, 1 or more"


class Settings(NamedTuple):
    """The arguments of `megapatch.audit.start`. Ranks compare these, as text, before they compare anything else.

    Attributes:
        every: optimizer steps from one comparison of the ranks to the next.
        raises: whether a finding of one rank raises AuditError on all ranks.
    """

    every: int = _DEFAULT
    raises: bool = False

    def __str__(self) -> str:
        return f"every {self.every}, raises {self.raises}"


def settings_for(every: int | None, raises: bool) -> Settings:
    """Return the settings of an audit.

    Args:
        every: None for the number in the environment.

    Raises:
        MisuseError: for a number below 1.
    """
    if every is None:
        if complaint := bad_number(os.environ):
            log.warning("%s", complaint)
        every = _number(os.environ) or _DEFAULT
    elif every < 1:
        raise MisuseError(f"every={every}: {_EXPECTED}")
    return Settings(every, raises)


def bad_number(environment: Mapping[str, str]) -> str | None:
    """Return what is wrong with the number of steps in the environment, or None."""
    text = environment.get(EVERY, "").strip()
    return (
        f"{EVERY}={text}: {_EXPECTED}; it is taken for {_DEFAULT}" if text and not _number(environment) else None
    )


def _number(environment: Mapping[str, str]) -> int:
    """Return the number of steps in the environment; 0 if there is none, or it is not a number."""
    text = environment.get(EVERY, "").strip()
    return int(text) if text.isdecimal() else 0
