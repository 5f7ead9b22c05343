"""calls-alike, data-differs: data-parallel ranks train on as many microbatches, and on different data.

Watches   each microbatch that is trained on, and its loss. Their number and the losses since the last time are
          compared when the parameters of ranks are; and the tokens that they have divided by, and their learning
          rates and weight decay.
Limits    two ranks of many that read the same data are not seen, nor data that give losses which are all alike, or
          are but for their signs.
Cost      keeps the losses of up to 256 microbatches until ranks are compared.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

from .._mcore.side_table import SideTable
from ._audit import Audit, Part
from ._findings import observes
from ._hashes import hash_of

_MOST = 256
"""Losses that are kept, the last: where ranks are never compared nobody takes them."""


class _Trained:
    """Microbatches since the last comparison: how many, their losses where this is the last stage, and the tokens
    that finalize_model_grads() was last given, which it adds up over ranks in place."""

    def __init__(self) -> None:
        self.count = 0
        self.losses: deque[Any] = deque(maxlen=_MOST)
        self.divisor: Any = 0


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

    @observes
    def finishing(self, chunks: list[Any], num_tokens: Any) -> None:
        for chunk in chunks if num_tokens is not None else ():
            self._trained.get_or_make(chunk, _Trained).divisor = num_tokens

    def added_to(self, hashes: Any, chunks: list[Any]) -> Any:
        """Return hashes to compare with two rows more.

        The first has the number of microbatches, and the hash of their losses: 0 where losses are not here, not
        finite, or all alike but for their signs. The second has the divisor, a hash of the rates, and whether
        they are known. A rank that fails here adds zeros.
        """
        import torch

        row, other = rows = hashes.new_zeros(2, 3)
        for chunk in chunks:
            self._fill(row, other, self._trained.pop(chunk, _Trained()))
        self._fill_rates(other, chunks)
        return torch.cat([hashes, rows])

    @observes
    def _fill_rates(self, row: Any, chunks: list[Any]) -> None:
        optimizers = self.audit.models.optimizers_of(chunks[0])
        groups = [group for part in optimizers for group in getattr(part.optimizer, "param_groups", ())]
        rates = sorted({(float(group["lr"]), float(group.get("weight_decay", 0))) for group in groups})
        row[1], row[2] = zlib.crc32(repr(rates).encode()), bool(rates)

    @observes
    def _fill(self, row: Any, other: Any, trained: _Trained) -> None:
        import torch

        row[0], other[0] = trained.count, trained.divisor  # of the last chunk; all have the same
        if trained.losses:
            values = torch.stack([*trained.losses]).float()
            sizes = values.abs()  # of on-policy losses in groups of two only the signs differ
            row[1:] = hash_of([values]) * ((sizes != sizes[0]).any() & values.isfinite().all())

    @observes
    def judge_ranks(self, ranks: str, highest: list[list[int]], of_complements: list[list[int]]) -> None:
        """Note what the ranks of a data-parallel group should have alike, or not alike.

        Args:
            ranks: the group, in words.
            highest: the highest of these numbers on any rank, in two rows.
            of_complements: the highest of their complements.
        """
        (most, *losses), (divisor, rates, _) = highest
        (least, *others), (least_divisor, other_rates, lacking) = of_complements
        if divisor != ~least_divisor:
            what = f"{ranks} have divided gradients by {~least_divisor} to {divisor} tokens"
            self.ledger.report("tokens-counted", "ranks", what)
        if ~lacking and rates != ~other_rates:
            what = f"optimizers of {ranks} have other learning rates, or weight decay"
            self.ledger.report("ranks-agree", "rates", what)
        self.ledger.judged["calls-alike"] += most > 0
        self.ledger.judged["data-differs"] += any(losses)
        if most != ~least:
            what = f"{ranks} have trained on {~least} to {most} microbatches since they were compared"
            self.ledger.report("calls-alike", "data-parallel", what)
        elif any(losses) and losses == [~other for other in others]:
            self.ledger.report("data-differs", "data-parallel", f"{ranks} have had the same losses")
