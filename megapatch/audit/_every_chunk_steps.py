"""every-chunk-steps: all chunks of a model are stepped.

Watches   calls and steps, as the other parts show them: as a call that trains begins, all of its chunks that the
          call before has trained were stepped since, or none; and none of them was never stepped, while an
          optimizer has stepped something that had no gradients.
Limits    a model that is trained and never stepped is not reported while no optimizer steps.
Cost      about a microsecond a chunk and call.
"""

from __future__ import annotations

from .._mcore.side_table import SideTable
from ._audit import Audit, Call, Part, Step
from ._findings import describe, observes


class _Trained:
    """A chunk that has been trained.

    Attributes:
        waits: whether it has had gradients since its last step.
        was_stepped: whether it was ever stepped.
        was_passed_over: whether, before its first step, an optimizer has stepped chunks that were never trained.
    """

    __slots__ = ("waits", "was_passed_over", "was_stepped")

    def __init__(self) -> None:
        self.waits = self.was_stepped = self.was_passed_over = False


class EveryChunkSteps(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._trained = SideTable()
        """About a chunk."""

    @observes
    def begin_call(self, call: Call) -> None:
        """Report chunks that were not stepped with the others."""
        if not call.trains:
            return
        trained = {chunk: noted for chunk in call.chunks if (noted := self._trained.get(chunk, None))}
        self.ledger.judged["every-chunk-steps"] += 1
        left = [chunk for chunk, noted in trained.items() if noted.waits]
        if left and len(left) < len(trained):
            names = [pair for chunk in left for pair in chunk.module.named_parameters()]
            what = f"{describe([parameter for _, parameter in names], names)} had gradients and were not stepped"
            self.ledger.report("every-chunk-steps", "left", f"{what}, as other chunks of their model were")
        elif any(trained[chunk].was_passed_over for chunk in left):
            what = "the model had gradients and was not stepped, and an optimizer has stepped what had none"
            self.ledger.report("every-chunk-steps", "model", what)

    @observes
    def end_call(self, call: Call) -> None:
        for chunk in call.chunks if call.trains and call.has_returned else ():
            if getattr(chunk, "param_to_bucket_group", None):  # else nothing of it is trained
                self._trained.get_or_make(chunk, _Trained).waits = True

    @observes
    def begin_step(self, step: Step) -> None:
        """Note chunks that wait while others are stepped that were never trained."""
        if not any(self._trained.get(chunk, None) for chunk in step.chunks):
            for chunk in self.audit.models.chunks:
                if (trained := self._trained.get(chunk, None)) and not trained.was_stepped:
                    trained.was_passed_over = True

    @observes
    def end_step(self, step: Step) -> None:
        for chunk in step.chunks:
            if trained := self._trained.get(chunk, None):
                trained.waits, trained.was_stepped, trained.was_passed_over = False, True, False
