"""gradients-kept: an optimizer step uses the gradients that finalize_model_grads() has finished.

Watches   finalize_model_grads(), and then the next step of the optimizer, or its prepare_grads(): torch counts the
          changes of a buffer in between. In all releases. Changes through .data are not counted: in the steps
          that are looked at closely 128 elements of a buffer, or more, are compared.
Limits    changes of other elements through .data, or by an extension.
Cost      some microseconds a step; no sync: what is compared is read as the step ends.
"""

from __future__ import annotations

from typing import Any

from .._mcore.bucket_groups import chunks_of
from .._mcore.main_params import has_memory
from .._mcore.side_table import SideTable
from ..patch import Site
from ._audit import Audit, Part, Step
from ._findings import observes
from ._models import grad_buffers
from ._samples import differs, spread_over
from ._watching import RAISED, around, before, site


class GradientsKept(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._finished = SideTable()
        """About a buffer, as its gradients were finished: its counts, and a sample, if it is looked at closely."""
        self._differ: list[Any] = []
        """Whether elements have changed uncounted in the step that is under way, as tensors."""

    def sites(self) -> tuple[Site, ...]:
        path = "MixedPrecisionOptimizer.prepare_grads"
        return (
            site(
                "megatron.core.distributed.finalize_model_grads",
                {"finalize_model_grads": around(self._begin, self._note_finished)},
                expected={"finalize_model_grads": ("model", "num_tokens")},
            ),
            site("megatron.core.optimizer.optimizer", {path: before(self._look)}),
        )

    @observes
    def _begin(self, model: Any, num_tokens: Any = None, *_: Any, **__: Any) -> None:
        for part in self.audit.parts:
            part.finishing(chunks_of(model) or [], num_tokens)

    @observes
    def _note_finished(self, _: None, result: Any, model: Any, *__: Any, **___: Any) -> None:
        if result is RAISED:
            return
        for buffer in grad_buffers(chunks_of(model) or []):
            sample = spread_over(buffer.grad_data) if self.audit.looks() and has_memory(buffer.grad_data) else None
            self._finished.set(buffer, (_counts(buffer), sample))

    @observes
    def _look(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self._compare(self.audit.models.stepped_by(optimizer))

    @observes
    def begin_step(self, step: Step) -> None:
        """Note gradients that were changed since they were finished."""
        self._compare(step.chunks)

    def _compare(self, chunks: list[Any]) -> None:
        for buffer in grad_buffers(chunks):
            before = self._finished.pop(buffer, None)  # the step itself may change them
            if before is None:
                continue
            self.ledger.judged["gradients-kept"] += 1
            counts, sample = before
            if counts != _counts(buffer):
                self._report()
            elif sample is not None:
                self._differ.append(differs(sample, spread_over(buffer.grad_data)))

    def _report(self) -> None:
        what = "gradients were changed between finalize_model_grads() and the optimizer step"
        self.ledger.report("gradients-kept", "changed", what)

    @observes
    def end_step(self, step: Step) -> None:
        """Note changes that torch has not counted; Megatron's step has waited for the GPU by now."""
        differ, self._differ = self._differ, []
        if any(map(bool, differ)):
            self._report()

    @observes
    def zeroed(self, buffer: Any) -> None:
        self._finished.pop(buffer, None)


def _counts(buffer: Any) -> tuple[int, int]:
    """Return two numbers, one of which changes when a buffer is changed in place or gets other memory."""
    return buffer.grad_data._version, int(buffer.grad_data.untyped_storage().nbytes())
