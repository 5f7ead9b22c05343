"""The facts that the processes of a run have to agree on, and their differences, in words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from .. import _versions
from .._engine.engine import this_process
from .._versions import exact_version

Facts = dict[str, tuple[str, str]]
"""The findings in one process, by the name of a distribution or ``patch at module``: the value to compare, and the
reason to give where it differs. Plain types, because they travel between versions of megapatch."""

LOOK = "finding this out"
"""Name of the fact that the others could be found out."""


def look() -> Facts:
    """Return `facts`, or the one fact that finding them out raised: other processes wait for this one's."""
    try:
        return facts()
    except Exception as error:  # a file system that answers ESTALE, say
        return {LOOK: (f"impossible, {type(error).__name__}: {error}", "")}


def facts() -> Facts:
    """Return the facts in which processes have to agree: versions, then sites in the catalogue's order."""
    found = {LOOK: ("possible", ""), "megapatch": (exact_version(), "")}
    for distribution, version in _versions.here().items():
        if _versions.PACKAGES[distribution] in sys.modules:
            found[distribution] = (version, "")
    this_process().load_families()
    for record in this_process().records:
        for patch, module in record.rows():
            if module in sys.modules:
                record.refresh()
                targets = ", ".join(target.target for target in record.installed if target.is_in_effect)
                value = f"{record.status.value} ({targets})" if targets else record.status.value
                found[f"{patch.name} at {module}"] = (value, record.reason)
    return found


def difference(everyone: Sequence[Facts], who: Callable[[list[int]], str], others: int = 0) -> str | None:
    """Describe the first fact that processes disagree on, and count the others; None when they agree.

    Args:
        everyone: the facts of each process, or of each group of processes with the same facts.
        who: words for the processes at these positions of `everyone`.
        others: how many more facts are known to differ.
    """
    sentences = differences(everyone, who)
    if not sentences:
        return None
    others += len(sentences) - 1
    more = f". And {others} more" if others else ""
    return f"{sentences[0]}{more}. `megapatch doctor` shows more, in each environment"


def differences(everyone: Sequence[Facts], who: Callable[[list[int]], str]) -> list[str]:
    """Describe each fact that processes disagree on, in the order of the facts.

    Args:
        everyone: as in `difference`.
        who: as in `difference`.
    """
    sentences = []
    for name in dict.fromkeys(name for found in everyone for name in found):
        holders: dict[str, list[int]] = {}
        for position, found in enumerate(everyone):
            if name in found:
                holders.setdefault(found[name][0], []).append(position)
        if len(holders) > 1:
            clauses = [
                f"{value} on {who(members)}" + (f" ({why})" if (why := everyone[members[0]][name][1]) else "")
                for value, members in holders.items()
            ]
            sentences.append(f"{name} is {'; '.join(clauses)}")
    return sentences
