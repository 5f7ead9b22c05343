"""The checkpoint that the tracker names stays until its successor is complete.

Symptom   with async_save, a job that ends while a checkpoint is written has none: the one before, which the
          tracker names, went as the save began. In Bridge with most_recent_k=1; in both with non-persistent
          checkpoints in a global folder, where a save begins before the last one is complete. To 0.4 Bridge's
          tracker names the step of the training when the save is finalized, a folder that there is not.
Upstream  NVIDIA-NeMo/Megatron-Bridge#4678, #4820, #5184; in 0.3 to 0.5, right in 0.6. Megatron has it to 0.19.
          The tracker of a later step: Megatron-Bridge#3269; in 0.3 and 0.4, right in 0.5.
Seam      the module function that removes checkpoints: it keeps all from the tracked one on, if these are more
          than it was going to keep. A save writes the tracker when it is complete. Where the tracker names a
          folder that there is not, the newest one before it counts as tracked. During Bridge's save_checkpoint(),
          which makes the functions that finalize the save, the counters are a copy.
Limits    a checkpoint that is replaced goes with the next save: until then there is one more. All stay while the
          tracker is there and cannot be read. Nothing changes where it is not a file (multi-storage client).
          After a load of an older step the later non-persistent checkpoints count as newer: the next one may be
          removed while it is written, and the save raises. Remove the later ones first. Bridge before 0.3, which
          NeMo-RL 0.4 pins, has no tracker but latest_train_state.pt: its checkpoints go as without the patch.
Cost      a look at the folder and at a small file in each removal, on rank 0.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..._mcore.known import arguments_of
from ..._python.dotted import find
from ..._ranks import place
from ...patch import FIXED, NEEDED, UNKNOWN, UNSUPPORTED, Patch, Site, Verdict
from .._diagnosis import (
    codes_of,
    gone,
    lacking,
    missing_attributes,
    missing_parameters,
    missing_reads,
    most_urgent,
)

BRIDGE = "megatron.bridge.training.checkpointing"
REMOVE, KEEP = "cleanup_old_non_persistent_checkpoint", "leave_ckpt_num"
SAVE, COUNTERS, FINALIZE = "save_checkpoint", "train_state", "train_state_finalize_fn"
TRACKER, PREFIX = "get_checkpoint_tracker_filename", "iter_"
OWN = "train_state_global_filename"


def diagnose(module: ModuleType) -> Verdict:
    """Look at what the real function takes: it removes folders."""
    if not hasattr(module, REMOVE):
        return gone(REMOVE, module)
    path = f"{module.__name__}:{REMOVE}"
    missing = [*missing_attributes(f"{module.__name__}:", TRACKER), *missing_reads(path, "rglob", PREFIX)]
    if missing := [*missing, *missing_parameters(path, "save_dir", KEEP)]:
        return lacking(missing)
    if not missing_parameters(path, "max_iteration"):
        return Verdict(FIXED, f"{REMOVE}() takes the newest complete checkpoint")
    return Verdict(NEEDED, f"{REMOVE}() keeps the newest folders, complete or not")


def diagnose_tracker(module: ModuleType) -> Verdict:
    """Look at the function that finalizes a save, where the real save_checkpoint() makes it."""
    if not hasattr(module, SAVE):
        return gone(SAVE, module)
    path = f"{module.__name__}:{SAVE}"
    if missing := [*missing_parameters(path, "state"), *missing_reads(path, COUNTERS)]:
        return lacking(missing)
    made = [
        part for code in codes_of(getattr(module, SAVE)) for part in code.co_consts if isinstance(part, CodeType)
    ]
    named = [code.co_freevars for code in made if code.co_name == FINALIZE]
    finalizes = [names for names in named if "tracker_filename" in names]
    if not finalizes and any(OWN in names for names in named) and missing_reads(path, TRACKER):
        return Verdict(UNSUPPORTED, "the tracker is Bridge's own file alone, which is not read")
    if not finalizes:
        return Verdict(UNKNOWN, f"expected {SAVE}() to write the tracker in {FINALIZE}()")
    if any(COUNTERS in names for names in finalizes):
        return Verdict(NEEDED, "the tracker names the step at which a save is finalized")
    return Verdict(FIXED, "the tracker names the step that was saved")


def diagnose_bridge(module: ModuleType) -> Verdict:
    """Say what most needs attention of both."""
    tracker = diagnose_tracker(module)
    return tracker if tracker.kind is UNSUPPORTED else most_urgent(tracker, diagnose(module))


def keep_the_tracked(remove: Callable[..., Any]) -> Callable[..., Any]:
    module, signature = sys.modules[remove.__module__], inspect.signature(remove)

    @functools.wraps(remove)
    def patched_cleanup_old_non_persistent_checkpoint(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        folder, keep = given.arguments["save_dir"], given.arguments[KEEP]
        if isinstance(folder, (str, Path)) and isinstance(keep, int) and keep > 0 and place()[0] == 0:
            newer = _from_tracked_on(Path(folder), Path(getattr(module, TRACKER)(str(folder))))
            given.arguments[KEEP] = max(keep, newer)
        return remove(*given.args, **given.kwargs)

    return patched_cleanup_old_non_persistent_checkpoint


def _from_tracked_on(folder: Path, tracker: Path) -> int:
    """Count the checkpoints that are not older than the tracked one, found and ordered as upstream does.

    All, and more, where the tracker is there and does not say which it is, as after a full disk.
    """
    text = ""
    try:
        text = tracker.read_text()
        tracked = int(text)
    except FileNotFoundError:
        return 0
    except (OSError, ValueError):
        return 0 if text.strip() == "release" else sys.maxsize
    try:
        steps = [int(found.name.removeprefix(PREFIX)) for found in folder.rglob(f"{PREFIX}*")]
    except (OSError, ValueError):
        return 0
    tracked = max((step for step in steps if step <= tracked), default=tracked)
    return sum(step >= tracked for step in steps)


def save_a_copy_of_the_counters(save_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(save_checkpoint)
    is_needed = diagnose_tracker(sys.modules[save_checkpoint.__module__]).kind is NEEDED

    @functools.wraps(save_checkpoint)
    def patched_save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        state = arguments_of(signature, args, kwargs).get("state")
        counters = find(state, COUNTERS)
        if not is_needed or counters is None or not find(state, "cfg.checkpoint.async_save"):
            return save_checkpoint(*args, **kwargs)
        state.train_state = copied = copy.copy(counters)
        try:
            return save_checkpoint(*args, **kwargs)
        finally:
            if state.train_state is copied:
                state.train_state = counters

    return patched_save_checkpoint


PATCH = Patch(
    name="megatron.tracked-checkpoint-stays",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4678",
    sites=(
        Site("megatron.training.checkpointing", diagnose, replace={REMOVE: keep_the_tracked}),
        Site(BRIDGE, diagnose_bridge, replace={REMOVE: keep_the_tracked, SAVE: save_a_copy_of_the_counters}),
    ),
)
