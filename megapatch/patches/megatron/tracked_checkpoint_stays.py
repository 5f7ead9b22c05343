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

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..._ranks import place
from ...patch import FIXED, NEEDED, UNSUPPORTED, Patch, Site, Verdict
from .._diagnosis import expect_none, most_urgent, unmet

REMOVE, KEEP = "cleanup_old_non_persistent_checkpoint", "leave_ckpt_num"
TRACKER, PREFIX = "get_checkpoint_tracker_filename", "iter_"


def diagnose(module: ModuleType) -> Verdict:
    """Look at what the real function takes: it removes folders."""
    expect_none(*unmet.attributes(f"{module.__name__}:", REMOVE))
    path = f"{module.__name__}:{REMOVE}"
    expect_none(
        *unmet.attributes(f"{module.__name__}:", TRACKER),
        *unmet.reads(path, "rglob", PREFIX),
        *unmet.parameters(path, "save_dir", KEEP),
    )
    if not unmet.parameters(path, "max_iteration"):
        return Verdict(FIXED, f"{REMOVE}() takes the newest complete checkpoint")
    return Verdict(NEEDED, f"{REMOVE}() keeps the newest folders, complete or not")


def diagnose_bridge(module: ModuleType) -> Verdict:
    """Say what most needs attention of both."""
    tracker = _of_bridge("diagnose_tracker", module)
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


def _of_bridge(name: str, found: Any) -> Any:
    """Call a function of the module for Megatron-Bridge, which is loaded only then: few have Bridge."""
    from . import _tracked_checkpoint_of_bridge

    return getattr(_tracked_checkpoint_of_bridge, name)(found)


PATCH = Patch(
    name="megatron.tracked-checkpoint-stays",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4678",
    sites=(
        Site("megatron.training.checkpointing", diagnose, replace={REMOVE: keep_the_tracked}),
        Site(
            "megatron.bridge.training.checkpointing",
            diagnose_bridge,
            replace={
                REMOVE: keep_the_tracked,
                "save_checkpoint": functools.partial(_of_bridge, "save_a_copy_of_the_counters"),
            },
        ),
    ),
)
