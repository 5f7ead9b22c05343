"""State that a step adds up outside of its gradients, and that a dropped step would leave to the next.

A router counts tokens, and finalize_model_grads() moves its bias. Losses of the model's own add up for the log.
With fp16 the loss scale moves before the optimizer steps. Routes to be replayed wait for a later part of the step.
Megatron resets each of these where a step ends well, and nowhere else.

Counts belong to the gradients: code that zeroes those calls `forget_counts`. `StepState` puts back the rest.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._python.dotted import find
from .side_table import SideTable

COUNTS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps", "qb_beta_accum", "qb_beta_count")
"""Buffers of a router that are zero between steps: from 0.12 on, from 0.15 on (two), and two of 0.19."""
BIASES = ("expert_bias", "qb_beta")
"""Buffers of a router that finalize_model_grads() moves from the counts."""
TRACKERS = (
    ("megatron.core.parallel_state", "_MOE_LAYER_WISE_LOGGING_TRACKER"),  # 0.12
    ("megatron.core.transformer.moe.moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER"),  # 0.13 to 0.17
    ("megatron.core.transformer.moe.moe_logging", "_MOE_METRICS_TRACKER"),  # after 0.17
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper.tracker"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper.tracker"),
)
"""Module, and attribute: a dictionary, or an object of `moe_logging`."""
_with_state = SideTable()
"""By chunk: its modules that have any of the above. Walking through all modules takes milliseconds.

Weak references, as a module refers to its config, whose functions refer to the chunk.
"""


def forget_counts(chunk: Any) -> None:
    """Zero the counts of a chunk's routers, as finalize_model_grads() does. No wait for the device."""
    if counts := list(counts_in(chunk)):
        import torch

        torch._foreach_zero_(counts)


def counts_in(chunk: Any) -> Iterator[Any]:
    """Yield the counts of a chunk's routers since they were zeroed."""
    return buffers(chunk, COUNTS)


class StepState:
    """The state of a model outside of gradients when a step begins; it makes a few small copies, and only for MoE.

    Args:
        chunks: of the model, Megatron's DistributedDataParallel.
        optimizer: of which an fp16 loss scale is remembered; None for none.
        logged: whether losses to be logged are, those of all models. A step of several calls, between which
            other models train, has an `OwnLosses` instead.
    """

    def __init__(self, chunks: Iterable[Any], optimizer: Any = None, logged: bool = True) -> None:
        self._chunks = list(chunks)
        self._biases = [copy_of(list(buffers(chunk, BIASES))) for chunk in self._chunks]
        modules = [module for chunk in self._chunks for module in _modules(chunk)]
        places = [place for path in (TRACKERS if logged else ()) for place in _found(*path)]
        self._attributes = [_attribute(*place) for place in places]
        replays = [replay for module in modules if (replay := getattr(module, "router_replay", None)) is not None]
        self._contents = [_contents(thing) for thing in (*replays, *_loss_scalers(optimizer))]
        timers = next((chunk.config.timers for chunk in self._chunks), None)
        self._timers: Any = timers if hasattr(timers, "_timers") else None
        self._running = running_timers(self._timers) if self._timers else set()

    def put_back(self) -> None:
        """Put everything back in place, and zero the counts. Runs no collective and waits for nothing."""
        for chunk, biases in zip(self._chunks, self._biases, strict=True):
            forget_counts(chunk)
            copy_into(list(buffers(chunk, BIASES)), biases)
        for put_back in (*self._attributes, *self._contents):
            put_back()
        for name in running_timers(self._timers) - self._running if self._timers else ():
            self._timers._timers[name].stop()


def running_timers(timers: Any) -> set[str]:
    """Return the names of Megatron's timers that were started and not stopped; starting one again raises."""
    return {name for name, timer in timers._timers.items() if timer._started}


# ---------------------------------------------------------------------------- a model's modules
def _modules(chunk: Any) -> list[Any]:
    found: list[weakref.ref[Any]] | None = _with_state.get(chunk)
    if found is None:
        names = {*COUNTS, *BIASES}
        found = [
            weakref.ref(module)
            for module in chunk.modules()
            if any(module._buffers.get(name) is not None for name in names)
            or getattr(module, "router_replay", None) is not None
        ]
        _with_state.set(chunk, found)
    return [module for reference in found if (module := reference()) is not None]


def buffers(chunk: Any, names: Iterable[str]) -> Iterator[Any]:
    for module in _modules(chunk):
        for name in names:
            if (buffer := module._buffers.get(name)) is not None:
                yield buffer


def copy_of(tensors: list[Any]) -> Any:
    """Copy small tensors into one, in a single operation on the device."""
    import torch

    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else None


def copy_into(tensors: list[Any], copy: Any) -> None:
    import torch

    if tensors:
        parts = copy.split([tensor.numel() for tensor in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


# ---------------------------------------------------------------------------- attributes and their values
def _found(module: str, path: str) -> Iterator[tuple[Any, str]]:
    owners, _, name = path.rpartition(".")
    owner = find(sys.modules.get(module), owners)
    if hasattr(owner, name):
        yield owner, name


def _loss_scalers(optimizer: Any) -> Iterator[Any]:
    for part in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
        if (scaler := getattr(part, "grad_scaler", None)) is not None:
            yield scaler


def _attribute(owner: Any, name: str) -> Callable[[], None]:
    value = _value(getattr(owner, name))
    return lambda: setattr(owner, name, value())


def _contents(thing: Any) -> Callable[[], None]:
    """Return a function that gives an object its attributes again. Their tensors are replaced, never changed."""
    before = {name: list(value) if isinstance(value, list) else value for name, value in vars(thing).items()}

    def put_back() -> None:
        vars(thing).clear()
        vars(thing).update(before)

    return put_back


def _value(value: Any) -> Callable[[], Any]:
    """Return a function that restores a value to its present state, in place, and returns it.

    A tensor stays the same object: a CUDA graph may write into it.
    """
    import torch

    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return lambda: value.copy_(copy)
    if isinstance(value, dict):
        parts = {name: _value(part) for name, part in value.items()}

        def restored() -> Any:
            now = {name: part() for name, part in parts.items()}
            value.clear()
            value.update(now)
            return value

        return restored
    if hasattr(value, "__dict__") and type(value).__module__.endswith(".moe_logging"):
        attributes = _value(vars(value))
        return lambda: (attributes(), value)[1]
    return lambda: value
