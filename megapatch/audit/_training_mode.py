"""training-mode, evaluation-mode: dropout and auxiliary losses are on in calls that train only.

Watches   each forward-backward call, as it begins: `training` of the chunks' modules, where they have dropout or a
          router with an auxiliary loss, for which it makes a difference; and that of each layer with dropout.
          And torch's Module.train(), by which eval() works, too: Megatron-LM's train_rl.py changes the mode in its
          forward step. No hook is registered on any module.
Limits    a call in which the mode of any module is changed is not judged. The mode of the model inside a chunk's
          wrappers counts, and that of layers in which something is trained: a frozen tower may be in eval(). Of
          dropout without a torch.nn.Dropout only the rates of the config and of Megatron's layers are known. Of
          routers the model's mode counts.
Cost      a fraction of a microsecond a layer and call; a look through a chunk's modules in its first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

from .._mcore.side_table import SideTable
from ..patch import Site
from ._audit import Audit, Call, Part
from ._chunks import has_router_losses
from ._watching import before, site

_RATES = ("hidden_dropout", "attention_dropout")
"""Of the config, and of Megatron's and Transformer Engine's layers."""


class TrainingMode(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._droppers = SideTable()
        """About a chunk: its model, and the layers that drop something, if any is dropped."""
        self._suspected: set[Call] = set()
        """Calls under way that began in the wrong mode, which nothing has changed since."""

    def sites(self) -> Iterator[Site]:
        yield site("torch.nn.modules.module", {"Module.train": before(self._note_change)})

    def _note_change(self, *_: Any, **__: Any) -> None:
        self._suspected.clear()

    def drops(self) -> bool:
        """Return whether anything is dropped in a model that is there and has made a call."""
        return any(self._droppers.get(chunk) for chunk in self.audit.models.chunks)

    def begin_call(self, call: Call) -> None:
        """Suspect a call whose models are in the other mode."""
        for chunk in call.chunks:
            model = _unwrapped(chunk)
            if model is chunk:
                continue
            known = self._droppers.get_or_make(chunk, functools.partial(_droppers, chunk, model))
            parts = [part for reference in known if (part := reference()) is not None]
            if not parts and call.trains and has_router_losses(chunk.config):
                parts = [model]
            self.ledger.judged["training-mode" if call.trains else "evaluation-mode"] += bool(parts)
            if any(part.training != call.trains for part in parts):
                self._suspected.add(call)

    def end_call(self, call: Call) -> None:
        """Report a call whose models were in the other mode all the time."""
        if call not in self._suspected:
            return
        self._suspected.discard(call)
        if call.trains:
            what = "a forward-backward call trains a model, or layers of it, in eval()"
            self.ledger.report("training-mode", "eval", what)
        else:
            what = "a forward-only call runs a model, or layers of it, in train(), with dropout"
            self.ledger.report("evaluation-mode", "train", what)


def _droppers(chunk: Any, model: Any) -> list[weakref.ref[Any]]:
    """Return a chunk's model, and its layers that drop something and have something that is trained."""
    modules = dict(model.named_modules())
    dropping = {name: module for name, module in modules.items() if _drops(module)}
    trained = [module for name, module in dropping.items() if _is_trained(name, modules)]
    return [*map(weakref.ref, (model, *trained))] if dropping or _has_rate(chunk.config) else []


def _drops(module: Any) -> bool:
    import torch

    return module.p > 0 if isinstance(module, torch.nn.Dropout) else _has_rate(module)


def _has_rate(owner: Any) -> bool:
    rates = [vars(owner).get(name) for name in _RATES]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _is_trained(name: str, modules: dict[str, Any]) -> bool:
    """Return whether the innermost module around this one, or it, that has parameters has any that are trained."""
    parameters = list(modules[name].parameters())
    while name and not parameters:
        name = name.rpartition(".")[0]
        parameters = list(modules[name].parameters())
    return any(parameter.requires_grad for parameter in parameters)


def _unwrapped(chunk: Any) -> Any:
    """Return the model in a chunk without its wrappers, which a forward step may leave out."""
    import torch

    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk
