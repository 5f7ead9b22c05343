"""Differences that are known. To be removed row by row: a row whose difference no longer occurs fails its test.

A row keeps its operations out of the sequences that are drawn for its layouts, so that they find other defects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rigs.megatron.save import minor

from .layouts import LAYOUTS, Layout
from .plan import REPLAYED, WAYS, Sequence
from .ranks import RAISES

PLAIN = "abort"
UNREDUCED = ("in the forward pass", "in the backward pass", "before the reduce")


def aborts(*places: str, ways: tuple[str, ...] = WAYS) -> tuple[str, ...]:
    return tuple(f"{way} {place}" for way in ways for place in places)


class Known(NamedTuple):
    """A row of KNOWN."""

    report: str
    """The difference; a number where the project has one."""
    operations: tuple[str, ...]
    layouts: Callable[[Layout], bool]
    kinds: frozenset[str]
    """The kinds of values that differ after `shows`, at least."""
    shows: Sequence

    def covers(self, operation: str, layout: str) -> bool:
        return operation in self.operations and self.layouts(LAYOUTS[layout])


KNOWN = (
    Known(
        "10b: without a TrainStep, logged losses stay after an abort",
        aborts(*UNREDUCED, ways=(PLAIN,)),
        lambda layout: layout.is_moe,
        frozenset({"logged"}),
        Sequence("moe", ("abort in the backward pass",)),
    ),
    Known(
        "10a and 10b: so does the expert bias, after the reduce",
        aborts("after the reduce", "in the optimizer", ways=(PLAIN,)),
        lambda layout: layout.is_moe,
        frozenset({"logged", "expert bias"}),
        Sequence("moe", ("abort in the optimizer",)),
    ),
    Known(
        "new: without a TrainStep, routes that are replayed are those of the next steps, too",
        aborts(REPLAYED, ways=(PLAIN,)),
        lambda layout: layout.has_replay,
        frozenset({"logged", "loss", "gradient norm", "weights"}),
        Sequence("moe", (f"{PLAIN} {REPLAYED}",)),
    ),
    Known(
        "new: without a TrainStep, an abort in the optimizer counts for the loss scale",
        aborts("in the optimizer", ways=(PLAIN,)),
        lambda layout: layout.is_fp16,
        frozenset({"loss scale"}),
        Sequence("fp16", ("step", "abort in the optimizer")),
    ),
    Known(
        "new: 0.15 cannot offload an optimizer: NameError, logging is not imported",
        ("offload and onload",),
        lambda layout: minor() == 15,
        frozenset({RAISES}),
        Sequence("fp32", ("offload and onload",)),
    ),
)


def is_free(operation: str, layout: str) -> bool:
    """Return whether no row covers the operation."""
    return not any(row.covers(operation, layout) for row in KNOWN)
