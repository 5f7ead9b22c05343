"""training-mode, evaluation-mode: dropout and auxiliary losses are on in calls that train, and off in the others.

Watches   each forward-backward call, as it begins: `training` of the chunks' modules, where they have dropout or a
          router with an auxiliary loss, for which it makes a difference.
Limits    the mode of a chunk's outermost module counts. Of dropout without a torch.nn.Dropout only the config's
          rates are known.
Cost      about a microsecond a call; a look through a chunk's modules in its first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._audit import Audit, Call, Part
from ._findings import observes
from ._models import has_router_losses
from ._notes import Notes


class Modes(Part):
    name = "modes"
    doc = __doc__

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._has_dropout: Notes[bool] = Notes("dropout")
        """About a chunk."""

    @observes
    def begin_call(self, call: Call) -> None:
        """Note a call in the other mode."""
        chunks = [chunk for chunk in call.chunks if hasattr(chunk, "module")]
        training = [chunk for chunk in chunks if chunk.module.training]
        if call.trains and len(training) < len(chunks):
            if any(
                self._drops(chunk) or has_router_losses(chunk.config) for chunk in chunks if chunk not in training
            ):
                what = "a forward-backward call trains a model in eval(), without its dropout and auxiliary losses"
                self.ledger.report("training-mode", "eval", what)
        elif not call.trains and any(self._drops(chunk) for chunk in training):
            what = "a forward-only call runs a model in train(), with dropout"
            self.ledger.report("evaluation-mode", "train", what)

    def _drops(self, chunk: Any) -> bool:
        return self._has_dropout.get_or_make(chunk, lambda: any(rate > 0 for rate in _rates(chunk)))


def _rates(chunk: Any) -> Iterator[float]:
    """Yield the rates of dropout in a chunk."""
    import torch

    yield from (getattr(chunk.config, f"{place}_dropout", 0.0) for place in ("hidden", "attention"))
    yield from (module.p for module in chunk.module.modules() if isinstance(module, torch.nn.Dropout))
