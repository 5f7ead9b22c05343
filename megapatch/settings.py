"""The MEGAPATCH_* environment variables, and patch names as users type them.

MEGAPATCH_DISABLE   comma-separated patch names or globs that stay off
MEGAPATCH_ONLY      comma-separated patch names or globs; everything else stays off
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

DISABLE = "MEGAPATCH_DISABLE"
ONLY = "MEGAPATCH_ONLY"


def matching(pattern: str, known: Iterable[str]) -> list[str]:
    """The known names that a name or glob stands for."""
    return [name for name in known if fnmatchcase(name, pattern)]


def unknown_name(name: str, known: Iterable[str]) -> str:
    """One sentence about a name or glob that stands for no patch, with what was probably meant."""
    import difflib  # only when a name is wrong

    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}?" if near else f"known patches: {', '.join(known)}."
    return f"no patch is called {name!r}; {meant}"


@dataclass(frozen=True)
class Settings:
    """What the user switched off or on, as names and globs."""

    disable: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        def names(variable: str) -> tuple[str, ...]:
            return tuple(part for raw in environment.get(variable, "").split(",") if (part := raw.strip()))

        return cls(disable=names(DISABLE), only=names(ONLY))

    def why_disabled(self, name: str) -> str | None:
        """The reason why this patch stays off, or None when it may be applied."""
        for pattern in self.disable:
            if matching(pattern, [name]):
                return f"switched off by {DISABLE}={pattern}"
        if self.only and not any(matching(pattern, [name]) for pattern in self.only):
            return f"not named by {ONLY}={','.join(self.only)}"
        return None

    def complaints(self, known: Iterable[str]) -> list[str]:
        """One sentence for each name in the environment that stands for no patch."""
        known = list(known)
        given = [(DISABLE, pattern) for pattern in self.disable] + [(ONLY, pattern) for pattern in self.only]
        return [
            f"{variable}: {unknown_name(pattern, known)}"
            for variable, pattern in given
            if not matching(pattern, known)
        ]
