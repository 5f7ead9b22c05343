"""Offloads and swaps, which are events: a model is looked at in the step after them.

Watches   the offload helpers of Megatron's buffers and optimizers, torch_memory_saver, verl and SkyRL, and the
          switch of models in slime and miles, in the releases that have them. And, as calls and steps begin, the
          addresses of a model's weights and gradients, and of an optimizer's state. Other code that frees, moves
          or exchanges memory leaves other addresses.
Limits    of each buffer one parameter is looked at, of each optimizer one. Memory that came back at the same
          address, and values that are written in place, leave no trace here.
Cost      some microseconds a buffer and optimizer in each call and step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from .._mcore.main_param_pairs import pairs
from .._mcore.main_params import has_memory
from .._mcore.side_table import SideTable
from ..patch import Site
from ._audit import Audit, Call, Part, Step
from ._chunks import grad_buffers
from ._findings import observes
from ._loaded_is_there import MOMENTS
from ._watching import before, site

_HELPERS = (
    "offload_megatron_model_to_cpu",
    "load_megatron_model_to_gpu",
    "offload_megatron_optimizer",
    "load_megatron_optimizer",
)
_BUFFERS = "_ParamAndGradBuffer.offload_to_cpu", "_ParamAndGradBuffer.reload_from_cpu"
_OPTIMIZERS = "MegatronOptimizer.offload_to_cpu", "MegatronOptimizer.restore_from_cpu"
_SAVER = "TorchMemorySaver.pause", "TorchMemorySaver.resume"
_SWITCH = ("MegatronTrainRayActor._switch_model",)
_KNOWN = (
    ("offload", "megatron.core.distributed.param_and_grad_buffer", _BUFFERS, "up to 0.15"),
    ("offload", "megatron.core.optimizer.optimizer", _OPTIMIZERS, "up to 0.14"),
    ("offload", "torch_memory_saver.entrypoint", _SAVER, None),
    ("offload", "verl.utils.megatron_utils", _HELPERS, None),
    ("offload", "skyrl_train.distributed.megatron.megatron_utils", _HELPERS, None),
    ("offload", "skyrl.backends.skyrl_train.distributed.megatron.megatron_utils", _HELPERS, None),
    ("swap", "slime.backends.megatron_utils.actor", _SWITCH, "up to v0.2.1"),
    ("swap", "miles.backends.megatron_utils.actor", _SWITCH, "up to v0.2.1"),
)
"""Kind of event, module, functions, and the releases that lack them."""
_PARAMETERS = "parameters"


class _Places(NamedTuple):
    """Where something has its memory.

    Attributes:
        reasons: number of loads and offloads seen when the addresses were noted.
        addresses: by what is there; 0 for memory that was freed.
    """

    reasons: int
    addresses: dict[str, list[int]]


class Offloads(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._places = SideTable()
        """About a chunk, and about an optimizer that others consist of."""
        self._known = 0
        self._latest: tuple[int, str] | None = None
        """The optimizer step and the name of the latest helper: it is called for one buffer after the other."""

    def sites(self) -> Iterator[Site]:
        for kind, module, paths, lacking in _KNOWN:
            looks = (functools.partial(self._note, kind, f"{path.rpartition('.')[2]}()") for path in paths)
            yield site(module, dict(zip(paths, map(before, looks), strict=True)), optional=lacking)

    # ------------------------------------------------------------------------ those that are known
    @observes
    def _note(self, kind: str, what: str, /, *_: Any, **__: Any) -> None:
        self._known += 1
        self.audit.may_have_broken = True
        if self._latest != (self.ledger.step, what):
            self._latest = (self.ledger.step, what)
            self.ledger.happened(kind, what)

    # ------------------------------------------------------------------------ all others
    def begin_call(self, call: Call) -> None:
        for chunk in call.chunks:
            self._compare(chunk, _memory_of(chunk))

    def begin_step(self, step: Step) -> None:
        for chunk in step.chunks:
            self._compare(chunk, _memory_of(chunk))
        for optimizer in step.optimizers:
            self._compare(optimizer, {"optimizer state": [_address(tensor) for tensor in _state_of(optimizer)]})

    def _compare(self, owner: Any, addresses: dict[str, list[int]]) -> None:
        """Note an event if something is elsewhere than it was, for no reason that is known."""
        now = _Places(self._known + self.audit.loads, addresses)
        before = self._places.get(owner, now)
        self._places.set(owner, now)
        if before.reasons != now.reasons:
            return
        moved = [what for what, places in addresses.items() if _have_moved(before.addresses[what], places)]
        if moved:
            kind = "swap" if moved == [_PARAMETERS] and all(addresses[_PARAMETERS]) else "offload"
            self.audit.disturbed(kind, f"other memory of {' and '.join(moved)}")


def _memory_of(chunk: Any) -> dict[str, list[int]]:
    """Return the addresses of each gradient buffer, and of its first parameter."""
    buffers = list(grad_buffers([chunk]))
    weights = [buffer.param_data for buffer in buffers if getattr(buffer, "param_data", None) is not None]
    firsts = [next(iter(buffer.buckets[0].params_list)) for buffer in buffers if buffer.buckets]
    return {
        _PARAMETERS: [_address(parameter) for parameter in firsts],
        "their buffers": [_address(weight) for weight in weights],
        "gradients": [_address(buffer.grad_data) for buffer in buffers],
    }


def _state_of(optimizer: Any) -> Iterator[Any]:
    """Return the first main parameter, if there is one, and the moments of the first parameter."""
    yield from (main for _, _, main in islice(pairs(optimizer), 1) if main is not None)
    inner = getattr(optimizer, "optimizer", None)
    for state in islice(getattr(inner, "state", {}).values(), 1):
        yield from (state[name] for name in MOMENTS if name in state)


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr()) if has_memory(tensor) else 0


def _have_moved(before: list[int], now: list[int]) -> bool:
    """Return whether addresses differ; those of what has come since, as moments in a first step, do not count."""
    return len(before) == len(now) and before != now
