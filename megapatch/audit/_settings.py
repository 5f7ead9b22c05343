"""How often the audit compares ranks, whether a finding ends training, and which rules are accepted."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

from .._engine.settings import ACCEPT, EVERY, names_in
from .._version import see
from ..errors import MisuseError
from ._rules import RULES

log = logging.getLogger("megapatch")

_DEFAULT = 50
_EXPECTED = "expected a number of steps, 1 or more"


class Settings(NamedTuple):
    """The arguments of `megapatch.audit.start`. Ranks compare these, as text, before they compare anything else.

    Attributes:
        every: optimizer steps from one comparison of the ranks to the next.
        raises: whether a finding of one rank raises AuditError on all ranks.
        accepted: names of rules whose findings and notes are not kept; ranks may differ in them.
    """

    every: int = _DEFAULT
    raises: bool = False
    accepted: tuple[str, ...] = ()

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
        every = _number(os.environ) or _DEFAULT
    elif every < 1:
        raise MisuseError(f"every={every}: {_EXPECTED}")
    for complaint in bad_values(os.environ):
        from .._engine.complaints import warn_of_a_setting  # few environments have any

        warn_of_a_setting(complaint)
    accepted = names_in(os.environ, ACCEPT)
    if at_risk := [name for name in accepted if name in RULES and not RULES[name].is_note]:
        log.warning("audit: %s=%s: findings of it are not kept" + see("audit-accepted"), ACCEPT, ",".join(at_risk))
    return Settings(every, raises, accepted)


def bad_values(environment: Mapping[str, str]) -> list[str]:
    """Return what is wrong with the audit's values in the environment, in one sentence each."""
    text = environment.get(EVERY, "").strip()
    complaints = []
    for name in names_in(environment, ACCEPT):
        if name not in RULES:
            from .._engine.complaints import unknown_name  # only when a name is wrong

            complaints.append(f"{ACCEPT}: {unknown_name(name, list(RULES), 'rule', 'rules')}")
    if text and not _number(environment):
        complaints.append(f"{EVERY}={text}: {_EXPECTED}; it is taken for {_DEFAULT}")
    return complaints


def _number(environment: Mapping[str, str]) -> int:
    """Return the number of steps in the environment; 0 if there is none, or it is not a number."""
    text = environment.get(EVERY, "").strip()
    return int(text) if text.isdecimal() else 0
