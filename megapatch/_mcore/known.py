"""Recognise the arguments that a patch knows: it leaves all others to upstream.

Tests of Megatron's and of frameworks call patched functions with Mocks, and with objects that have two attributes.
A patch asks these nothing: the original decides what they need. The object of a method is taken to be of its
class.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from .._python.dotted import find

CONFIG = "megatron.core.model_parallel_config:ModelParallelConfig"
DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
NN_MODULE = "torch.nn:Module"
OPTIMIZER = "megatron.core.optimizer.optimizer:MegatronOptimizer"
TIMERS = "megatron.core.timers:Timers"


def is_a(thing: Any, kind: str) -> bool:
    """Return whether an object is of a class, or of one derived from it; it is not if that is not loaded.

    Its type says so, and not its `__class__`, which a Mock with a spec makes up.

    Args:
        kind: ``"module:Class"``.
    """
    module, _, path = kind.partition(":")
    return find(sys.modules.get(module), path) in type(thing).__mro__


def is_model(model: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether this is a list of model chunks."""
    return isinstance(model, (list, tuple)) and bool(model) and all(is_a(chunk, NN_MODULE) for chunk in model)


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments of a call by name; none of a call that the original will refuse."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError:
        return {}
