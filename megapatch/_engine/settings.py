"""The MEGAPATCH_* environment variables, and patch names as users type them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..patches._catalogue import RETIRED

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

RAISE = "raise"

SAME_NUMBERS = "@same-numbers"
"""Stands for the patches that do not change the numbers of a run that did not crash."""

_MOST_NAMES = 9
"""Names that a sentence lists one by one."""
_OFF, _ON = ("", "0", "false", "no", "off"), ("1", "true", "yes", "on")
WORDS = (*_OFF, *_ON, RAISE, SAME_NUMBERS)
"""What a variable may hold besides numbers, and names of patches and rules."""


def matching(pattern: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a name or glob stands for."""
    return [name for name in known if fnmatchcase(name, pattern)]


def stands_for(pattern: str, name: str, changes_numbers: bool) -> bool:
    """Return whether a name, a glob or `SAME_NUMBERS` stands for the patch of this name."""
    return not changes_numbers if pattern == SAME_NUMBERS else bool(matching(pattern, [name]))


def unknown_name(name: str, known: Iterable[str], kind: str = "patch", kinds: str = "patches") -> str:
    """Say in one sentence that a name or glob stands for no patch, or other kind, and suggest similar names."""
    if kind == "patch" and name in RETIRED:
        return f"{name} was removed from megapatch; {RETIRED[name]} has the repair"
    import difflib  # only when a name is wrong

    known = list(known)
    if name.startswith("@"):
        return f"no selection of {kinds} is called {name!r}; known: {SAME_NUMBERS}"
    families = {patch.partition(".")[0] for patch in known}
    near = [f"{name}.*"] if name in families else difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if len(known) > _MOST_NAMES:  # their families
        known = list(dict.fromkeys(f"{name.partition('.')[0]}.*" if "." in name else name for name in known))
    meant = f"did you mean {' or '.join(near)}?" if near else f"known {kinds}: {', '.join(known)}."
    return f"no {kind} is called {name!r}; {meant}"


def names_in(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """Return the names that a variable lists, separated by commas."""
    return tuple(part for raw in environment.get(variable, "").split(",") if (part := raw.strip()))


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return one sentence for each variable that looks like one of ours and is not, with the one probably meant.

    That is a MEGAPATCH_* that is unknown, or a known ending after nearly that beginning: MEGAPATH_DISABLE.
    """
    prefix = "MEGAPATCH_"
    known = [name.removeprefix(prefix) for name in VARIABLES]
    found = []
    for name in sorted({*environment} - {*VARIABLES, RUN_TARGETS}):
        begins_alike = name.upper().startswith("MEGAPATCH")
        ending = next((ending for ending in known if name.upper().endswith(f"_{ending}")), None)
        if not begins_alike and not (ending and name.upper().startswith("ME")):
            continue
        import difflib  # only when a name is wrong

        if begins_alike:
            near = difflib.get_close_matches(name.upper().removeprefix("MEGAPATCH").strip("_"), known, n=1)
        else:
            beginning = name.upper().removesuffix(f"_{ending}").replace("_", "")
            near = [str(ending)] if difflib.SequenceMatcher(None, beginning, "MEGAPATCH").ratio() > 0.8 else []
        if near or begins_alike:
            meant = f"did you mean {prefix}{near[0]}?" if near else f"known are {prefix}{{{','.join(known)}}}"
            found.append(f"{name} is set and means nothing to megapatch; {meant}")
    return found


class Settings(NamedTuple):
    """The user's choices, as names and globs; a ``_value`` is a variable's text.

    `unknown_variables` has a sentence for each variable that looks like one of ours and is not; `without_audit`
    names the audit's variables that are set while MEGAPATCH_AUDIT is not.
    """

    disable: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    strict_value: str = ""
    no_entry_points_value: str = ""
    audit_value: str = ""
    quiet_value: str = ""
    without_audit: tuple[str, ...] = ()
    unknown_variables: tuple[str, ...] = ()

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
            unknown_variables=tuple(unknown_variables(environment)),
        )

    @property
    def strict(self) -> bool:
        """Whether a site that needs attention is an error. Also true for a value that means nothing."""
        return self.strict_value not in _OFF

    @property
    def no_entry_points(self) -> bool:
        """Whether patches of other distributions stay out. Also true for a value that means nothing."""
        return self.no_entry_points_value not in _OFF

    @property
    def audit(self) -> bool:
        """Whether the audit watches training. Also true for a value that means nothing."""
        return self.audit_value not in _OFF

    @property
    def quiet(self) -> bool:
        """Whether there is no first sign on standard error. Also true for a value that means nothing."""
        return self.quiet_value not in _OFF

    @property
    def _switches(self) -> dict[str, str]:
        return {
            STRICT: self.strict_value,
            NO_ENTRY_POINTS: self.no_entry_points_value,
            AUDIT: self.audit_value,
            QUIET: self.quiet_value,
        }

    def is_off(self, variable: str) -> bool:
        """Return whether this is the variable of a switch that is off."""
        return self._switches.get(variable, "1") in _OFF

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

    def complaints(self, known: Iterable[str], more_to_come: bool = False) -> list[str]:
        """Write one sentence for each bad value in the environment.

        Args:
            known: the names of all patches that are loaded.
            more_to_come: whether other distributions have patches that are not loaded yet. A name that may be of
                such a patch is not judged: it has a family, and not that of a known patch.
        """
        found = []
        for variable, value in self._switches.items():
            more, expected = ((RAISE,), f"1, 0 nor {RAISE}") if variable == AUDIT else ((), "1 nor 0")
            if value not in (*_OFF, *_ON, *more):
                found.append(f"{variable}={value} is neither {expected}; it is taken for 1")
        found += [f"{name} is set, and {AUDIT} is not; set {AUDIT}=1 to watch" for name in self.without_audit]
        known = list(known)
        families = {patch.partition(".")[0] for patch in known}
        for variable, pattern in [
            *((DISABLE, name) for name in self.disable),
            *((ONLY, name) for name in self.only),
        ]:
            family, dot, _ = pattern.partition(".")
            may_come = more_to_come and family not in families and (dot or "*" in pattern) and pattern[0] != "@"
            if pattern != SAME_NUMBERS and not matching(pattern, [*known, *RETIRED]) and not may_come:
                found.append(f"{variable}: {unknown_name(pattern, known)}")
        return found
