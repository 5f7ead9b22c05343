"""A load that gives an expert rank the random streams of another one says so.

Symptom   after a load all expert-parallel ranks draw the same random numbers, silently: those of the first rank.
          Megatron's own layers draw from these streams when weights of experts are initialized, and with
          moe_router_force_load_balancing; experts of your own that drop elements, in each step.
Upstream  NVIDIA/Megatron-LM#6858 (merged after 0.19.2); in 0.12 to 0.19. get_rng_state() saves a state for each
          tensor- and pipeline-parallel rank, and leaves expert parallelism out, as do verl, ms-swift and AReaL.
Seam      CudaRNGStatesTracker.set_states(), by which Megatron and these frameworks load: a WARNING, once for each
          tracker. A state begins with its seed. The expert seed less the model-parallel one is the rank's own, for
          any --seed: where loaded states have another difference than those that the tracker holds, they are
          another rank's. get_rng_state() is not an option: frameworks have their own, and old checkpoints stay.
Limits    a warning: states that were not saved cannot be loaded. Seed again after the load. Transformer Engine's
          tracker and graph-safe states, which are generators, are not looked at.
Cost      below 200 ns for each recomputation of activations; 4 us where it has drawn from an expert stream.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..._mcore.side_table import SideTable
from ..._version import see
from ...patch import NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import answering_none, expect_none, running, unmet

# Names of the streams that Megatron's tracker holds.
MODEL_PARALLEL, EXPERTS = "model-parallel-rng", "expert-parallel-rng"
MODULE = "megatron.core.tensor_parallel.random"
TRACKER = "CudaRNGStatesTracker"
SEEDING = "model_parallel_cuda_manual_seed"
STATES = "states_"
SEED_BYTES = 8

SAID = SideTable()
"""Trackers that have warned."""

_logger = logging.getLogger("megapatch")


def warn_of_others(set_states: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_states)
    def patched_set_states(self: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
        # Recomputation mostly has the same object.
        if isinstance(states, dict) and states.get(EXPERTS) is not self.states_.get(EXPERTS):
            _compare(self, self.states_, states)
        return set_states(self, states, *args, **kwargs)

    return patched_set_states


def _compare(tracker: Any, own: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    before, found = _seed(own.get(EXPERTS)), _seed(loaded.get(EXPERTS))
    if before == found or tracker in SAID:
        return
    others = _seed(own.get(MODEL_PARALLEL)), _seed(loaded.get(MODEL_PARALLEL))
    if None in (before, found, *others) or (expected := before - others[0] + others[1]) == found:
        return
    SAID.set(tracker, True)
    _logger.warning(
        "megatron.expert-streams-loaded: this load gives an expert rank the random stream of another one: "
        "expected one that was seeded with %d, found %d. Expert ranks now draw the same numbers. If yours draw "
        "any in training, call model_parallel_cuda_manual_seed() on all ranks after the load, with a new seed"
        + see("expert-streams"),
        expected,
        found,
    )


def _seed(state: Any) -> Any:
    """Return the seed that a generator's state begins with, on CPU and GPU; None of what is not such a state."""
    import torch

    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.numel() < SEED_BYTES:
        return None
    return int.from_bytes(state[:SEED_BYTES].tolist(), sys.byteorder)


# ------------------------------------------------------------------------------------------ the diagnosis
def diagnose(module: ModuleType) -> Verdict:
    """Set states of the real tracker, and read how it is seeded."""
    expect_none(
        *unmet.attributes(f"{MODULE}:", TRACKER),
        *unmet.attributes(f"{MODULE}:{TRACKER}", "set_states", "add"),
        *unmet.reads(f"{MODULE}:{TRACKER}.add", STATES),
        *unmet.reads(f"{MODULE}:{SEEDING}", "get_expert_model_parallel_rank", "add"),
    )
    states: dict[str, Any] = {}
    with running("set_states()"):
        tracker = object.__new__(answering_none(getattr(module, TRACKER)))
        unpatched(getattr(module, TRACKER).set_states)(tracker, states)
    if getattr(tracker, STATES) is not states:
        return Verdict(UNKNOWN, f"expected set_states() to keep the states that it is given in {STATES}")
    return Verdict(NEEDED, "a tracker takes another expert rank's streams without a word")


PATCH = Patch(
    name="megatron.expert-streams-loaded",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/6858",
    sites=(Site(MODULE, diagnose, replace={f"{TRACKER}.set_states": warn_of_others}),),
)
