"""Public reports, with a short sequence that shows it without patches, in each Megatron that has the defect."""

from __future__ import annotations

from typing import NamedTuple

from .layouts import layouts_here
from .plan import Sequence, plan
from .ranks import RAISES

TWO_STEPS = ("step", "save", "step")


class Reported(NamedTuple):
    """A row of REPORTED."""

    report: str
    kind: str
    """The kind of values that differs, at least."""
    shows: Sequence
    disabled: str = "*"
    """The patches that it is shown without."""

    @property
    def is_here(self) -> bool:
        """Whether this Megatron has the layout, and torch reads its saves. No release has repaired any of them."""
        return self.shows.layout in layouts_here() and plan(self.shows).sequence == self.shows


# Of 0.12 to 0.19: 1 and 2 in all; 9, 10a and 10b from 0.15 on, the first with these losses; 5 and 11 from 0.16 on.
REPORTED = (
    Reported("1", "weights", Sequence("bf16", (*TWO_STEPS, "load of the weights"))),
    Reported("2", "schedule", Sequence("fp32", (*TWO_STEPS, "load"))),
    Reported("5", "Adam's step", Sequence("bf16, sharded", (*TWO_STEPS, "load"))),
    Reported("9", "weights", Sequence("moe", ("abort in the backward pass",))),
    Reported("10a", "expert bias", Sequence("moe", ("abort after the reduce",))),
    Reported("10b", "logged", Sequence("moe", ("abort after the reduce",))),
    # Without megatron.save-plan-cache the load raises as well, for the plan that is kept.
    Reported(
        "11",
        RAISES,
        Sequence("bf16, on disk", ("step", "abandoned async save", "save", "load")),
        "megatron.own-save-results",
    ),
)
REPORTED_HERE = [row for row in REPORTED if row.is_here]
