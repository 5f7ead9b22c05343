"""The checkpoint that the tracker names stays until its successor is complete.

Symptom   with async_save, a job that ends while a checkpoint is written has none: the one before, which the
          tracker names, went as the save began. In Bridge with most_recent_k=1; in both with non-persistent
          checkpoints in a global folder, where a save begins before the last one is complete.
Upstream  NVIDIA-NeMo/Megatron-Bridge#4678, #4820, #5184; in 0.3 to 0.5, right in 0.6. Megatron has it to 0.19.
Seam      the module function that removes checkpoints: it keeps all from the tracked one on, if these are more
          than it was going to keep. A save writes the tracker when it is complete.
Limits    a checkpoint that is replaced goes with the next save: until then there is one more. All stay while the
          tracker is there and cannot be read. Nothing changes where it is not a file (multi-storage client).
Cost      a look at the folder and at a small file in each removal, on rank 0.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..._ranks import place
from ...patch import FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import gone, lacking, missing_attributes, missing_parameters, missing_reads

REMOVE, KEEP = "cleanup_old_non_persistent_checkpoint", "leave_ckpt_num"
TRACKER, PREFIX = "get_checkpoint_tracker_filename", "iter_"


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
        return sum(int(found.name.removeprefix(PREFIX)) >= tracked for found in folder.rglob(f"{PREFIX}*"))
    except (OSError, ValueError):
        return 0


PATCH = Patch(
    name="megatron.tracked-checkpoint-stays",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4678",
    sites=tuple(
        Site(f"megatron.{package}.checkpointing", diagnose, replace={REMOVE: keep_the_tracked})
        for package in ("training", "bridge.training")
    ),
)
