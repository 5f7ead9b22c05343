"""The usual causes of each broken rule, the likeliest first, and how to tell them apart."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .cause import Cause
from .runs import RUNS
from .state import STATE
from .steps import STEPS

CAUSES: Mapping[str, tuple[Cause, ...]] = MappingProxyType({**STEPS, **STATE, **RUNS})
"""By rule."""


def causes_of(rule: str, what: str) -> list[Cause]:
    """Return the likely causes of a finding, in order: of its rule, without those that its sentence rules out.

    Args:
        what: the finding's sentence.
    """
    return [cause for cause in CAUSES.get(rule, ()) if cause.says in what]
