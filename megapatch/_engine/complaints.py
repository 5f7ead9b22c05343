"""Sentences about a MEGAPATCH_* environment with something wrong in it: most have nothing."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable

from .._version import see
from ..patches._catalogue import RETIRED
from .edges import is_the_command
from .settings import (
    AUDIT,
    DISABLE,
    OFF,
    ON,
    ONLY,
    PREFIX,
    RAISE,
    SAME_NUMBERS,
    VARIABLES,
    Settings,
    matching,
    others_in,
)

log = logging.getLogger("megapatch")

_MOST_NAMES = 9
"""Names that a sentence lists one by one."""
WORDS = (*OFF, *ON, RAISE, SAME_NUMBERS)
"""What a variable may hold besides numbers, and names of patches and rules."""


def warn_of_a_setting(problem: str) -> None:
    """Log what is wrong with the environment; `megapatch doctor` says it at its end."""
    if not is_the_command("doctor"):
        log.warning("%s" + see("settings"), problem)


def unknown_name(name: str, known: Iterable[str], kind: str = "patch", kinds: str = "patches") -> str:
    """Say in one sentence that a name or glob stands for no patch, or other kind, and suggest similar names."""
    if kind == "patch" and name in RETIRED:
        return f"{name} was removed from megapatch; {RETIRED[name]} has the repair"
    known = list(known)
    if name.startswith("@"):
        return f"no selection of {kinds} is called {name!r}; known: {SAME_NUMBERS}"
    families = {patch.partition(".")[0] for patch in known}
    near = [f"{name}.*"] if name in families else difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    if len(known) > _MOST_NAMES:  # their families
        known = list(dict.fromkeys(f"{name.partition('.')[0]}.*" if "." in name else name for name in known))
    meant = f"did you mean {' or '.join(near)}?" if near else f"known {kinds}: {', '.join(known)}."
    return f"no {kind} is called {name!r}; {meant}"


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return one sentence for each variable that looks like one of ours and is not, with the one probably meant.

    That is a MEGAPATCH_* that is unknown, or a known ending after nearly that beginning: MEGAPATH_DISABLE.
    """
    known = [name.removeprefix(PREFIX) for name in VARIABLES]
    found = []
    for name in others_in(environment):
        begins_alike = name.upper().startswith("MEGAPATCH")
        if begins_alike:
            near = difflib.get_close_matches(name.upper().removeprefix("MEGAPATCH").strip("_"), known, n=1)
        else:
            ending = next(ending for ending in known if name.upper().endswith(f"_{ending}"))
            beginning = name.upper().removesuffix(f"_{ending}")
            near = [ending] if difflib.SequenceMatcher(None, beginning, "MEGAPATCH").ratio() > 0.8 else []
        if near or begins_alike:
            meant = f"did you mean {PREFIX}{near[0]}?" if near else f"known are {PREFIX}{{{','.join(known)}}}"
            found.append(f"{name} is set and means nothing to megapatch; {meant}")
    return found


def complaints(settings: Settings, known: Iterable[str], more_to_come: bool = False) -> list[str]:
    """Write one sentence for each bad value in the environment.

    Args:
        known: the names of all patches that are loaded.
        more_to_come: whether other distributions have patches that are not loaded yet. A name that may be of such
            a patch is not judged: it has a family, and not that of a known patch.
    """
    found = []
    for variable, value in settings.switches.items():
        more, expected = ((RAISE,), f"1, 0 nor {RAISE}") if variable == AUDIT else ((), "1 nor 0")
        if value not in (*OFF, *ON, *more):
            found.append(f"{variable}={value} is neither {expected}; it is taken for 1")
    found += [f"{name} is set, and {AUDIT} is not; set {AUDIT}=1 to watch" for name in settings.without_audit]
    known = list(known)
    families = {patch.partition(".")[0] for patch in known}
    patterns = [*((DISABLE, name) for name in settings.disable), *((ONLY, name) for name in settings.only)]
    for variable, pattern in patterns:
        family, dot, _ = pattern.partition(".")
        may_come = more_to_come and family not in families and (dot or "*" in pattern) and pattern[0] != "@"
        if pattern != SAME_NUMBERS and not matching(pattern, [*known, *RETIRED]) and not may_come:
            found.append(f"{variable}: {unknown_name(pattern, known)}")
    return found
