"""Advice for the user about a patch that is needed, or may be, and is not in place.

In the engine, because its log line and doctor are to say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .._version import REPOSITORY
from ..patch import PatchInfo
from .settings import DISABLE

ISSUE_TRACKER = f"{REPOSITORY}/issues"

_LONGEST = 280


def advice(patch: PatchInfo) -> str:
    """Return in one line the risk, how to accept it, and where to report it."""
    return f"{at_risk(patch)}; {acceptance([patch.name])}; {report_it()}"


def at_risk(patch: PatchInfo) -> str:
    """Describe a run without the patch: the first sentences of its Symptom section, else its summary."""
    import textwrap  # only when something is wrong

    symptom = patch.sections.get("Symptom")
    if not symptom:
        return f"at risk: {patch.summary}"
    text, *others = re.split(r"(?<=\.)\s+(?=[A-Z-])", symptom)
    for sentence in others:
        if len(f"{text} {sentence}") > _LONGEST:
            break
        text += f" {sentence}"
    return f"at risk: {textwrap.shorten(text.rstrip('.'), _LONGEST, placeholder=' ...')}"


def acceptance(names: Iterable[str], disabled: Iterable[str] = ()) -> str:
    """Return how to run without these patches.

    Args:
        names: patches that are not in place.
        disabled: the names that MEGAPATCH_DISABLE holds already.
    """
    return f"to run without: {DISABLE}={','.join(dict.fromkeys([*disabled, *names]))}"


def report_it() -> str:
    """Return how and where to report it."""
    return f"to report: `megapatch doctor --report` writes a file to attach ({ISSUE_TRACKER})"
