"""The functions of megatron.tracked-checkpoint-stays for Megatron-Bridge alone, loaded with it."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from ..._mcore.known import arguments_of
from ..._python.dotted import find
from ...patch import FIXED, NEEDED, UNKNOWN, UNSUPPORTED, Verdict
from .._diagnosis import codes_of, expect_none, unmet

TRACKER = "get_checkpoint_tracker_filename"
SAVE, COUNTERS, FINALIZE = "save_checkpoint", "train_state", "train_state_finalize_fn"
OWN = "train_state_global_filename"


def diagnose_tracker(module: ModuleType) -> Verdict:
    """Look at the function that finalizes a save, where the real save_checkpoint() makes it."""
    expect_none(*unmet.attributes(f"{module.__name__}:", SAVE))
    path = f"{module.__name__}:{SAVE}"
    expect_none(*unmet.parameters(path, "state"), *unmet.reads(path, COUNTERS))
    made = [
        part for code in codes_of(getattr(module, SAVE)) for part in code.co_consts if isinstance(part, CodeType)
    ]
    named = [code.co_freevars for code in made if code.co_name == FINALIZE]
    finalizes = [names for names in named if "tracker_filename" in names]
    if not finalizes and any(OWN in names for names in named) and unmet.reads(path, TRACKER):
        return Verdict(UNSUPPORTED, "the tracker is Bridge's own file alone, which is not read")
    if not finalizes:
        return Verdict(UNKNOWN, f"expected {SAVE}() to write the tracker in {FINALIZE}()")
    if any(COUNTERS in names for names in finalizes):
        return Verdict(NEEDED, "the tracker names the step at which a save is finalized")
    return Verdict(FIXED, "the tracker names the step that was saved")


def save_a_copy_of_the_counters(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(save_checkpoint)
    is_needed = diagnose_tracker(sys.modules[save_checkpoint.__module__]).kind is NEEDED

    @functools.wraps(save_checkpoint)
    def patched_save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        state = arguments_of(signature, args, kwargs).get("state")
        counters = find(state, COUNTERS)
        if not is_needed or not find(state, "cfg.checkpoint.async_save"):
            return save_checkpoint(*args, **kwargs)
        state.train_state = copied = copy.copy(counters)
        try:
            return save_checkpoint(*args, **kwargs)
        finally:
            if state.train_state is copied:
                state.train_state = counters

    return patched_save_checkpoint
