"""Functions that read the model they are given: which of them gather before, and sites that let them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, Site, Verdict
from .._diagnosis import lacking, missing_names, missing_parameters
from .._gathered import GATHERS, gathered_at_first_next, gathered_before_call

MERGE = "LoraParallelLinear.merge"
"""mcore-bridge's: adds a layer's adapters to its base weights, for an export; unmerge() subtracts them again."""


def diagnose_reader(path: str, parameter: str, module: ModuleType) -> Verdict:
    """Read a real function that reads the model it is given: does it gather before?"""
    found, name = f"{module.__name__}:{path}", path.rpartition(".")[2]
    if missing := missing_parameters(found, parameter):
        return lacking(missing)
    if len(missing_names(found, *GATHERS)) < len(GATHERS):
        return Verdict(FIXED, f"{name}() gathers the parameters that it reads")
    return Verdict(NEEDED, f"with overlap_param_gather {name}() reads parameters that are not gathered")


def diagnose_merge(module: ModuleType) -> Verdict:
    """Read the real method: it takes adapters, which take Transformer Engine."""
    missing = missing_names(f"{module.__name__}:{MERGE}", "get_delta_weights")
    return lacking(missing) if missing else diagnose_reader(MERGE, "self", module)


def gather_first(parameter: str, reader: Callable[..., Any]) -> Callable[..., Any]:
    return gathered_before_call(reader, _argument(reader, parameter))


def gather_at_first_next(parameter: str, stream: Callable[..., Any]) -> Callable[..., Any]:
    return gathered_at_first_next(stream, _argument(stream, parameter))


def _argument(function: Callable[..., Any], parameter: str) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def model_of(*args: Any, **kwargs: Any) -> Any:
        model = signature.bind(*args, **kwargs).arguments[parameter]
        return [] if model is None else model  # a rank that only receives

    return model_of


def exporter(module: str, path: str, parameter: str) -> Site:
    """Return the site of a generator function that streams the tensors of a model."""
    return Site(
        module=module,
        diagnose=functools.partial(diagnose_reader, path, parameter),
        replace={path: functools.partial(gather_at_first_next, parameter)},
    )
