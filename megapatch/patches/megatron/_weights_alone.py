"""What megatron.main-params-after-load makes, in a step, of weights that were loaded without its optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from ..._mcore.main_param_pairs import differing, pairs, stale_pairs
from ..._mcore.main_params import SHARDS, has_memory
from ..._version import see

INNER = "param_to_inner_param"
"""The copies of a HybridDeviceOptimizer, by the parameters that it steps."""

LoadOf = Callable[[Any, Any], Any]
"""Returns the load of a parameter that an optimizer has not agreed with yet; None where there is none."""
Loaded = tuple[Any, Any, Any, Any]
"""A load, a parameter, this rank's part of it, and its main parameter."""

_said: set[tuple[str, bool]] = set()
"""The lines whose loads were warned of, and whether main parameters followed."""

logger = logging.getLogger("megapatch")


def agree(optimizers: Sequence[Any], load_of: LoadOf) -> bool:
    """Let main parameters follow the loads that restored weights. Return whether all is settled now."""
    loaded = [each for optimizer in optimizers for each in _loaded(optimizer, load_of)]
    if not all(has_memory(tensor) for _, _, *tensors in loaded for tensor in tensors):
        return False  # offloaded by a framework: it cannot step now either
    restores = {load for load in {load for load, *_ in loaded} if load.is_restore()}
    restored = _stale([each for each in loaded if each[0] in restores])
    copies = [pair for each in optimizers for pair in _copies(each, load_of)] if restores else []
    _warn(restored, followed=True)
    for _, _, model, main in restored:
        main.copy_(model)
    _warn(_stale([each for each in loaded if each[0] not in restores]), followed=False)
    for (main, copy), differs in zip(copies, differing(copies), strict=True):
        if differs:
            copy.copy_(main)
    return True


def _loaded(optimizer: Any, load_of: LoadOf) -> Iterator[Loaded]:
    for parameter, model, main in pairs(optimizer):
        if main is not None and (load := load_of(parameter, optimizer)) is not None:
            yield load, parameter, model, main.data


def _stale(loaded: list[Loaded]) -> list[Loaded]:
    found = stale_pairs([(parameter, model, main) for _, parameter, model, main in loaded])
    stale = {id(parameter) for parameter, *_ in found}
    return [each for each in loaded if id(each[1]) in stale]


def _copies(optimizer: Any, load_of: LoadOf) -> Iterator[tuple[Any, Any]]:
    """Yield each main parameter of an offloaded optimizer and the copy that it steps, if something was loaded."""
    copies = getattr(optimizer.optimizer, INNER, {})
    groups = (getattr(optimizer, name, ()) for name in (SHARDS[0], "model_fp32_groups"))
    parameters = chain.from_iterable(chain.from_iterable(groups))
    if any(load_of(parameter, optimizer) is not None for parameter in parameters):
        yield from ((main.data, copy.data) for main, copy in copies.items())


def _warn(stale: list[Loaded], followed: bool) -> None:
    """Warn of each line whose loads these are, once."""
    outcome = (
        "they come from a checkpoint, so the optimizer's main parameters follow, and this step starts from them"
        if followed
        else "nothing shows that they were restored, so the optimizer's main parameters are left alone, as "
        "without megapatch, and this step writes them over the loaded weights"
    )
    for line in {load.line for load, *_ in stale}:
        if (line, followed) not in _said:
            _said.add((line, followed))
            logger.warning(
                "megatron.main-params-after-load: weights were loaded without optimizer state at %s; %s. To say "
                "what was meant: optimizer.reload_model_params() after a load that restores, `with "
                "megapatch.weight_sync.lent_weights():` around a load that lends" + see("weights-loaded"),
                line,
                outcome,
            )
