"""calls-alike, data-differs: data-parallel ranks train on as many microbatches, and on different data.

Watches   each microbatch that is trained on, and its loss. Their number and the losses since the last time are
          compared when the parameters of ranks are.
Limits    two ranks of many that read the same data are not seen, nor data that give losses which are all alike, or
          are but for their signs.
Cost      keeps the losses of up to 256 microbatches until ranks are compared.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from .._mcore.side_table import SideTable
from ._audit import Audit, Part
from ._findings import observes
from ._hashes import hash_of

_MOST = 256
"""Losses that are kept, the last: where ranks are never compared nobody takes them."""


class _Trained:
    """Microbatches since the last comparison: how many, and their losses where this is the last stage."""

    def __init__(self) -> None:
        self.count = 0
        self.losses: deque[Any] = deque(maxlen=_MOST)


class Microbatches(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._trained = SideTable()
        """About a chunk."""

    @observes
    def trained_on(self, chunk: Any, loss: Any, num_tokens: Any) -> None:
        trained = self._trained.get_or_make(chunk, _Trained)
        trained.count += 1
        if loss is not None:
            trained.losses.append(loss.detach())

    def added_to(self, hashes: Any, chunks: list[Any]) -> Any:
        """Return hashes to compare with a row more: the number of microbatches, and the hash of their losses.

        The hash is 0 where losses are not here, not finite, or all alike but for their signs. A rank that fails
        here adds zeros.
        """
        import torch

        row = torch.zeros_like(hashes[:1])
        for chunk in chunks:
            self._fill(row[0], self._trained.pop(chunk, _Trained()))
        return torch.cat([hashes, row])

    @observes
    def _fill(self, row: Any, trained: _Trained) -> None:
        import torch

        row[0] = trained.count  # of the last chunk; all have as many
        if trained.losses:
            values = torch.stack([*trained.losses]).float()
            sizes = values.abs()  # of on-policy losses in groups of two only the signs differ
            row[1:] = hash_of([values]) * ((sizes != sizes[0]).any() & values.isfinite().all())

    @observes
    def judge_ranks(self, ranks: str, highest: list[int], of_complements: list[int]) -> None:
        """Note what the ranks of a data-parallel group should have alike, or not alike.

        Args:
            ranks: the group, in words.
            highest: the highest of these numbers on any rank.
            of_complements: the highest of their complements.
        """
        self.ledger.judged.update(("calls-alike", "data-differs"))
        (most, *losses), (least, *others) = highest, of_complements
        if most != ~least:
            what = f"{ranks} have trained on {~least} to {most} microbatches since they were compared"
            self.ledger.report("calls-alike", "data-parallel", what)
        elif any(losses) and losses == [~other for other in others]:
            self.ledger.report("data-differs", "data-parallel", f"{ranks} have had the same losses")
