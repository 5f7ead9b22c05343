"""The MEGAPATCH_* environment variables, and the patches that they stand for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

DISABLE = "MEGAPATCH_DISABLE"
ONLY = "MEGAPATCH_ONLY"
STRICT = "MEGAPATCH_STRICT"
AUDIT = "MEGAPATCH_AUDIT"
EVERY = "MEGAPATCH_AUDIT_EVERY"
ACCEPT = "MEGAPATCH_AUDIT_ACCEPT"
NO_ENTRY_POINTS = "MEGAPATCH_NO_ENTRY_POINTS"
REPORT = "MEGAPATCH_REPORT"
QUIET = "MEGAPATCH_QUIET"

VARIABLES = {
    DISABLE: "keeps these patches off",
    ONLY: "keeps all others off",
    STRICT: "makes a patch that is not in place an error",
    AUDIT: "watches training; raise: a finding is an error on all ranks",
    EVERY: "optimizer steps between two comparisons of the ranks by the audit",
    ACCEPT: "rules of the audit that are broken on purpose",
    REPORT: "megapatch.check() and the audit write a file for each rank there",
    QUIET: "says nothing on standard error",
    NO_ENTRY_POINTS: "keeps patches of other distributions out",
}
"""All variables, and their meaning: in doctor, in docs/settings.md, and where a name is wrong."""

RUN_TARGETS = "MEGAPATCH_RUN_TARGETS"
"""Set by `megapatch run` for the processes below it."""

PREFIX = "MEGAPATCH_"
RAISE = "raise"

SAME_NUMBERS = "@same-numbers"
"""Stands for the patches that do not change the numbers of a run that did not crash."""

OFF, ON = ("", "0", "false", "no", "off"), ("1", "true", "yes", "on")


def matching(pattern: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a name or glob stands for."""
    return [name for name in known if fnmatchcase(name, pattern)]


def stands_for(pattern: str, name: str, changes_numbers: bool) -> bool:
    """Return whether a name, a glob or `SAME_NUMBERS` stands for the patch of this name."""
    return not changes_numbers if pattern == SAME_NUMBERS else bool(matching(pattern, [name]))


def names_in(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """Return the names that a variable lists, separated by commas."""
    return tuple(part for raw in environment.get(variable, "").split(",") if (part := raw.strip()))


def others_in(environment: Iterable[str]) -> tuple[str, ...]:
    """Return the variables, in order, that are not ours and perhaps meant for them.

    They begin alike, or nearly, and then end alike.
    """
    endings = tuple(name.removeprefix("MEGAPATCH") for name in VARIABLES)
    return tuple(
        name
        for name in sorted({*environment} - {*VARIABLES, RUN_TARGETS})
        if (upper := name.upper()).startswith("MEGAPATCH") or (upper.startswith("ME") and upper.endswith(endings))
    )


class Settings(NamedTuple):
    """The user's choices, as names and globs; a ``_value`` is a variable's text.

    `others` names variables that may be meant for ours, such as MEGAPATH_DISABLE; `without_audit` the audit's
    variables that are set while MEGAPATCH_AUDIT is not.
    """

    disable: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    strict_value: str = ""
    no_entry_points_value: str = ""
    audit_value: str = ""
    quiet_value: str = ""
    without_audit: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        def switch(variable: str) -> str:
            return environment.get(variable, "").strip().lower()

        return cls(
            disable=names_in(environment, DISABLE),
            only=names_in(environment, ONLY),
            strict_value=switch(STRICT),
            no_entry_points_value=switch(NO_ENTRY_POINTS),
            audit_value=switch(AUDIT),
            quiet_value=switch(QUIET),
            without_audit=tuple(name for name in (EVERY, ACCEPT) if switch(name) and not switch(AUDIT)),
            others=others_in(environment),
        )

    @property
    def strict(self) -> bool:
        """Whether a site that needs attention is an error. Also true for a value that means nothing."""
        return self.strict_value not in OFF

    @property
    def no_entry_points(self) -> bool:
        """Whether patches of other distributions stay out. Also true for a value that means nothing."""
        return self.no_entry_points_value not in OFF

    @property
    def audit(self) -> bool:
        """Whether the audit watches training. Also true for a value that means nothing."""
        return self.audit_value not in OFF

    @property
    def quiet(self) -> bool:
        """Whether there is no first sign on standard error. Also true for a value that means nothing."""
        return self.quiet_value not in OFF

    @property
    def switches(self) -> dict[str, str]:
        return {
            STRICT: self.strict_value,
            NO_ENTRY_POINTS: self.no_entry_points_value,
            AUDIT: self.audit_value,
            QUIET: self.quiet_value,
        }

    @property
    def may_be_wrong(self) -> bool:
        """Whether there is something to complain of, perhaps: names, words that no switch has, other variables."""
        words = set(self.switches.values()).difference(OFF, ON)
        return bool(words or self.disable or self.only or self.without_audit or self.others)

    def is_off(self, variable: str) -> bool:
        """Return whether this is the variable of a switch that is off."""
        return self.switches.get(variable, "1") in OFF

    def switched_off(self, name: str, changes_numbers: bool = True) -> str | None:
        """Say why this patch is explicitly off, or return None. One that is not loaded may change numbers."""
        for pattern in self.disable:
            if stands_for(pattern, name, changes_numbers):
                return f"switched off by {DISABLE}={pattern}"
        return None

    def why_disabled(self, name: str, changes_numbers: bool = True) -> str | None:
        """Say why this patch stays off, or return None when it may be applied."""
        off = self.switched_off(name, changes_numbers)
        if self.only and not any(stands_for(pattern, name, changes_numbers) for pattern in self.only):
            return off or f"not named by {ONLY}={','.join(self.only)}"
        return off
