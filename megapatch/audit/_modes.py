"""training-mode, evaluation-mode: dropout and auxiliary losses are on in calls that train, and off in the others.

Watches   each forward-backward call, as it begins: `training` of the chunks' modules, where they have dropout or a
          router with an auxiliary loss, for which it makes a difference. In a call that begins in the wrong mode
          it looks again as the model runs: Megatron-LM's train_rl.py changes the mode in its forward step.
Limits    the mode of the model inside a chunk's wrappers counts, and not that of its layers. Of dropout without a
          torch.nn.Dropout only the config's rates are known.
Cost      about a microsecond a call; a look through a chunk's modules in its first; a hook on the model in a call
          that begins in the wrong mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._audit import Audit, Call, Part
from ._findings import observes
from ._models import has_router_losses
from ._notes import Notes


class _Suspect:
    """A model that is in the wrong mode as a call begins, and is looked at again as it runs."""

    def __init__(self, model: Any) -> None:
        self._modes: set[bool] = set()
        self._hook = model.register_forward_pre_hook(lambda running, _: self._modes.add(running.training))

    def has_run(self, training: bool) -> bool:
        """Return whether it has run in this mode, and look no longer."""
        self._hook.remove()
        return training in self._modes


class Modes(Part):
    name = "modes"
    doc = __doc__

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._has_dropout: Notes[bool] = Notes("dropout")
        """About a chunk."""
        self._suspected: dict[Call, list[_Suspect]] = {}
        """By call that is under way, the models that it began to run in the wrong mode."""

    @observes
    def begin_call(self, call: Call) -> None:
        """Suspect the models that are in the other mode."""
        self.ledger.met.add("training-mode" if call.trains else "evaluation-mode")
        for chunk in call.chunks:
            model = _unwrapped(chunk)
            if model is not chunk and model.training != call.trains and self._matters(chunk, call):
                self._suspected.setdefault(call, []).append(_Suspect(model))

    @observes
    def end_call(self, call: Call) -> None:
        """Report a call whose models were in the other mode as they ran, too."""
        wrong = [suspect.has_run(not call.trains) for suspect in self._suspected.pop(call, [])]
        if not any(wrong):
            return
        if call.trains:
            what = "a forward-backward call trains a model in eval(), without its dropout and auxiliary losses"
            self.ledger.report("training-mode", "eval", what)
        else:
            what = "a forward-only call runs a model in train(), with dropout"
            self.ledger.report("evaluation-mode", "train", what)

    def _matters(self, chunk: Any, call: Call) -> bool:
        return self._drops(chunk) or (call.trains and has_router_losses(chunk.config))

    def _drops(self, chunk: Any) -> bool:
        return self._has_dropout.get_or_make(chunk, lambda: any(rate > 0 for rate in _rates(chunk)))


def _rates(chunk: Any) -> Iterator[float]:
    """Yield the rates of dropout in a chunk."""
    import torch

    yield from (getattr(chunk.config, f"{place}_dropout", 0.0) for place in ("hidden", "attention"))
    yield from (module.p for module in chunk.module.modules() if isinstance(module, torch.nn.Dropout))


def _unwrapped(chunk: Any) -> Any:
    """Return the model in a chunk without its wrappers, which a forward step may leave out."""
    import torch

    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk
