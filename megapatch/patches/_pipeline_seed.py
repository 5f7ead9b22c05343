"""Seeds that differ from pipeline stage to pipeline stage, as in Megatron-LM's own _set_random_seed()."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any

from ..patch import FIXED, NEEDED, Verdict
from ._diagnosis import expect_none, unmet

STAGE = "get_pipeline_model_parallel_rank"
"""Name of megatron.core.parallel_state's function: code that reads it makes the seed depend on the stage."""
_OFFSET = 100  # for each stage, as in megatron.training.initialize._set_random_seed


def diagnose_seed(seeding: tuple[str, ...], missing: list[str]) -> Verdict:
    """Return the verdict on the functions that choose a seed; `missing` lists unmet needs of the patch."""
    if not all(unmet.names(path, STAGE) for path in seeding):
        return Verdict(FIXED, "the seed depends on the pipeline stage")
    expect_none(*missing)
    return Verdict(NEEDED, "all pipeline stages have the same seed")


def seed_offset() -> int:
    """Return the number that this rank's stage adds to the seed; 0 before model parallel is initialized."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return 0
    stage: int = parallel_state.get_pipeline_model_parallel_rank()
    return _OFFSET * stage


def offset_seed_by_stage(set_seed: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, with the stage's offset added to its parameter `seed`."""
    place = list(inspect.signature(set_seed).parameters).index("seed")

    @functools.wraps(set_seed)
    def patched_set_seed(*args: Any, **kwargs: Any) -> Any:
        seed = kwargs.get("seed", args[place] if len(args) > place else None)
        if not isinstance(seed, numbers.Integral):
            return set_seed(*args, **kwargs)
        if "seed" in kwargs:
            kwargs["seed"] += seed_offset()
        else:
            args = (*args[:place], args[place] + seed_offset(), *args[place + 1 :])
        return set_seed(*args, **kwargs)

    return patched_set_seed
