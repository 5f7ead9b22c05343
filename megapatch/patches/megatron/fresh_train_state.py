"""A load of Megatron-Bridge's reads step and counters from the checkpoint, not what an earlier load has read.

Symptom   the second load of a file in a process has another step than its weights, silently. Load step 2, train
          two steps, load it again: weights of step 2 with a counter of 4, so samples are skipped. Load step 2,
          save step 5, load the latest: it is step 2 again, with the counter of a later step.
Upstream  NVIDIA-NeMo/Megatron-Bridge#4758; in 0.3 to 0.6. read_train_state() and read_run_config() are cached by
          file name. The trainer counts up the very counters that it has read, and each save writes the tracker of
          the latest step under the same name.
Seam      the module function by which every load goes, as load_checkpoint() does: both caches are empty when it
          begins. All ranks are in it, and reading is a collective. Outside of loads the caches are as before.
Limits    load_model_config() and other reads outside of a load find a file as it was first read since the last
          load.
Numbers   change after a second load, to those of a process that has loaded nothing else.
Cost      two small files and two broadcasts in each load, as in the first one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, unmet

MODULE = "megatron.bridge.training.checkpointing"
LOAD = "_load_checkpoint_from_path"
READERS = ("read_train_state", "read_run_config")
CLEAR = "cache_clear"


def diagnose(module: ModuleType) -> Verdict:
    """Look at the real functions: a load reads in collectives."""
    expect_none(*unmet.attributes(f"{module.__name__}:", LOAD, *READERS))
    if not any(hasattr(getattr(module, name), CLEAR) for name in READERS):
        return Verdict(FIXED, "what a load reads is not cached")
    if not unmet.names(f"{module.__name__}:{LOAD}", CLEAR):
        return Verdict(FIXED, f"{LOAD}() clears the caches of what it reads")
    return Verdict(NEEDED, f"{' and '.join(READERS)} are cached by file name, for all loads")


def read_again(load: Callable[..., Any]) -> Callable[..., Any]:
    checkpointing = sys.modules[load.__module__]

    @functools.wraps(load)
    def patched_load_checkpoint_from_path(*args: Any, **kwargs: Any) -> Any:
        for name in READERS:
            clear = getattr(getattr(checkpointing, name), CLEAR, None)
            if clear is not None:
                clear()
        return load(*args, **kwargs)

    return patched_load_checkpoint_from_path


PATCH = Patch(
    name="megatron.fresh-train-state",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4758",
    changes_numbers=True,
    sites=(Site(MODULE, diagnose, replace={LOAD: read_again}),),
)
