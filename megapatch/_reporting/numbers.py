"""Numbers of ranks in words."""

from __future__ import annotations

_MOST_RUNS = 16
"""Of numbers: every other one of 131,072 ranks would be 468,737 characters."""


def numbered(noun: str, numbers: list[int]) -> str:
    """Return numbers in words: ``rank 3``, or ``ranks 0-2, 5``; of many runs the first, and how many more."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MOST_RUNS])
    others = sum(last - first + 1 for first, last in runs[_MOST_RUNS:])
    more = f" and {others} more" if others else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {words}{more}"
