"""An optimizer step that could not be filled."""

from __future__ import annotations

from typing import Any

from ..patch import MegapatchError
from .sampler import Backlog


class EmptyStepError(MegapatchError, RuntimeError):
    """An optimizer step has too few prompt groups, and no more come.

    trained   prompt groups that the step had by then; they were given back
    target    prompt groups that it needs
    needed    eligible prompt groups that had to be there to go on: more than 1 before a step begins
    evicted   prompt groups that were too old and were cleared while it waited
    backlog   what is in the buffer besides
    """

    def __init__(
        self, why: str, *, trained: int, target: int, needed: int, evicted: int, backlog: Backlog
    ) -> None:
        super().__init__(
            f"an optimizer step has {trained} of its {target} prompt groups, needs {needed} to go on, and {why}. "
            f"Waiting: {backlog}. Evicted as too old meanwhile: {evicted} prompt groups. Let generation go on, "
            "and see that samples bear the version of their weights; or ask for fewer groups a step, or allow a "
            "larger max_staleness"
        )
        self.trained, self.target, self.needed = trained, target, needed
        self.evicted, self.backlog = evicted, backlog

    def __reduce__(self) -> tuple[Any, ...]:  # it may be raised in a Ray actor
        return BaseException.__new__, (type(self), *self.args), self.__dict__
