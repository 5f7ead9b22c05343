"""calls-alike, data-differs: data-parallel ranks train on as many microbatches, and on different data.

Watches   forward_step() of the schedules, which shows each microbatch that is trained on, and its loss. Their
          number and the losses since the last time are compared when the parameters of ranks are.
Limits    two ranks of many that read the same data are not seen, nor data that give losses which are all alike.
Cost      keeps a number a microbatch until ranks are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..patch import Site
from ._audit import Audit, Call, Part
from ._findings import observes
from ._hashes import hash_of
from ._notes import Notes
from ._sites import site


class Microbatches(Part):
    name = "microbatches"
    doc = __doc__

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._trained: Notes[list[Any]] = Notes("microbatches")
        """About a chunk: what each microbatch that was trained on since the last comparison has returned."""
        self._calls: list[Call] = []
        """Those that are under way."""

    def sites(self) -> tuple[Site, ...]:
        path = "forward_step"
        expected = {path: ("forward_step_func", "data_iterator", "model")}
        schedules = "megatron.core.pipeline_parallel.schedules"
        return (site(schedules, {path: self.watch_microbatch}, expected=expected),)

    def begin_call(self, call: Call) -> None:
        self._calls.append(call)

    def end_call(self, call: Call) -> None:
        self._calls.pop()

    def watch_microbatch(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward_step)
        def patched_forward_step(
            forward_step_func: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any
        ) -> Any:
            result = forward_step(forward_step_func, data_iterator, model, *args, **kwargs)
            if self._calls and self._calls[-1].trains:
                self._note(model, result)
            return result

        return patched_forward_step

    @observes
    def _note(self, chunk: Any, result: tuple[Any, Any]) -> None:
        output = result[0][0] if isinstance(result[0], list) else result[0]
        is_loss = getattr(output, "ndim", None) == 0  # else the output of a stage that is not the last
        self._trained.get_or_make(chunk, list).append(output.detach() if is_loss else None)

    def added_to(self, hashes: Any, chunks: list[Any]) -> Any:
        """Return hashes to compare with a row more: the number of microbatches, a hash of their losses, and 0.

        The hash is 0 where there are no losses, or all are alike. A rank that fails here adds zeros.
        """
        import torch

        row = torch.zeros_like(hashes[:1])
        for chunk in chunks:
            self._fill(row[0], self._trained.pop(chunk, []))
        return torch.cat([hashes, row])

    @observes
    def _fill(self, row: Any, trained: list[Any]) -> None:
        import torch

        row[0] = len(trained)  # of the last chunk; all have as many
        losses = [loss for loss in trained if loss is not None]
        if losses:
            values = torch.stack(losses).float()
            row[1] = hash_of([values])[0] * (values != values[0]).any()

    @observes
    def judge_ranks(self, highest: Any) -> None:
        """Note what the ranks of a data-parallel group should have alike, or not alike.

        Args:
            highest: the highest of these numbers on any rank, and the highest of their complements.
        """
        (most, losses, _), (least, others, _) = highest.tolist()
        if most != ~least:
            what = f"data-parallel ranks have trained on {~least} to {most} microbatches since they were compared"
            self.ledger.report("calls-alike", "data-parallel", what)
        elif losses and losses == ~others:
            self.ledger.report("data-differs", "data-parallel", "all data-parallel ranks have had the same losses")
