"""The parts of a check: a scenario that meets a defect, the layouts in which it runs, and its comparison.

A scenario is called on every rank. It raises `DefectSeen` when it meets its defect, and returns otherwise.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

TOLERANCE = 1e-5
"""Numbers are equal when no element differs by more, relative to the largest one or to 1."""


class DefectSeen(AssertionError):
    """A scenario has met the defect that it is about; the message describes it."""


class CannotRunHere(Exception):
    """Raised if this machine lacks something that a scenario needs; the message names it."""


class Layout(NamedTuple):
    """A way of dividing a world into groups.

    Attributes:
        name: such as ``pp2``; the rest of the world is data parallel.
        sizes: arguments of `init_parallel`.
        options: arguments of `tiny_gpt`.
    """

    name: str
    sizes: Mapping[str, int]
    options: Mapping[str, Any]

    def set_up(self) -> None:
        from ..testing import init_parallel

        init_parallel(**self.sizes)

    def model(self, **options: Any) -> Any:
        """Build a tiny GPT in this layout, which is set up."""
        from ..testing import tiny_gpt

        return tiny_gpt(**{**self.options, **options})


DP = Layout("dp", {}, {})
EVEN = (
    Layout("pp2", {"pp": 2}, {}),
    Layout("tp2", {"tp": 2}, {}),
    Layout("ep2", {"ep": 2}, {"experts": 2}),
)
"""The layouts of an even number of ranks, in addition to `DP`."""


class Check(NamedTuple):
    """A scenario with its name.

    Attributes:
        name: a patch's name, or that of something that megapatch adds.
        scenario: called with a `Layout` on every rank; returns the largest difference to a reference, or None if
            there are no numbers.
        compares: the two sides of the comparison, in words; "" where there are no numbers.
        layouts: whether to run in the layouts of `EVEN` as well.
        audited: whether the audit watches; not where the scenario itself breaks a rule, as with a fault.
    """

    name: str
    scenario: Callable[[Layout], float | None]
    compares: str = ""
    layouts: bool = False
    audited: bool = True

    def layouts_of(self, world_size: int) -> tuple[Layout, ...]:
        return (DP, *EVEN) if self.layouts and world_size % 2 == 0 else (DP,)


@contextlib.contextmanager
def the_defect(*errors: type[BaseException], says: str = "") -> Iterator[None]:
    """Raise DefectSeen in place of Megatron's own error, if that is one of these and matches `says`."""
    try:
        yield
    except errors as error:
        text = f"{type(error).__name__}: {error}".strip()
        if isinstance(error, DefectSeen) or not re.search(says, text):
            raise
        raise DefectSeen(text.splitlines()[0]) from error


def expect(condition: object, what: str) -> None:
    """Raise DefectSeen unless the condition is true."""
    if not condition:
        raise DefectSeen(what)


def same(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> float:
    """Return the largest difference of any element, relative to the largest one or to 1.

    Raises:
        DefectSeen: it is above `TOLERANCE`, or the names differ.
    """
    expect(
        found.keys() == expected.keys(), f"{what}: other tensors, {sorted(found)} instead of {sorted(expected)}"
    )
    largest = 0.0
    for name, tensor in expected.items():
        if tensor.numel():
            scale = max(1.0, float(tensor.abs().max()))
            difference = float((found[name] - tensor).abs().max()) / scale
            expect(difference <= TOLERANCE, f"{what}: {name} differs by {difference:.2g}")  # not if it is NaN
            largest = max(largest, difference)
    return largest
