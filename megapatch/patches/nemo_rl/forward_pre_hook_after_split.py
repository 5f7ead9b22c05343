"""After the first split step parameters are gathered before each forward pass, as after train().

Symptom   with overlap_param_gather (NeMo-RL's default) ranks train on from parameters that were never gathered:
          they silently drift apart. Measured on main at 7ea279abf, tiny model, two steps: 9e-3 to 2e-2.
Upstream  NVIDIA-NeMo/RL#3773. From v0.7.0 on hooks are off until the first step; train() puts them back after it,
          but main's finish_train_step does not.
Seam      finish_train_step: hooks and param_sync_func are put back once it has returned.
Limits    they are put back even if the first step was skipped for an overflow, when there is nothing to gather.
Numbers   change: to those of train().
Cost      none: gathers overlap with the forward pass, as they were meant to.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import ABSENT, FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, unmet
from .._ray_actors import actors_of
from ._workers import MODULE, WORKER, has_own_split_step, names_in, no_worker

OFF = "_first_train_step_forward_pre_hook_disabled"
SAVED = "_first_train_step_param_sync_func"


def diagnose(module: ModuleType) -> Verdict:
    """Look at which of the real methods mention that hooks are off."""
    worker = getattr(module, WORKER, None)
    if worker is None:
        return no_worker(module)
    if not has_own_split_step(worker):
        return Verdict(ABSENT, "this version has no finish_train_step of its own")
    knowing = {name for name in vars(worker) if OFF in names_in(worker, name)}
    finishing = {"finish_train_step", "_finish_train_step_body"}
    called = set().union(*(names_in(worker, name) for name in finishing))
    if not knowing:
        expect_none(f"{OFF} in the methods of {WORKER}")
    if knowing & (finishing | called):
        return Verdict(FIXED, "finish_train_step puts the hooks back")
    missing = unmet.attributes(f"{module.__name__}:{WORKER}", "enable_forward_pre_hook", "finish_train_step")
    missing += unmet.attributes(f"{module.__name__}:", "get_model_config")
    expect_none(*missing)
    return Verdict(NEEDED, "finish_train_step leaves the hooks off")


def put_hooks_back(worker: Any) -> None:
    """Put the hooks back as train() does after the first step. Does nothing if they are on, or never existed."""
    if getattr(worker, OFF, False):
        worker.enable_forward_pre_hook()
        sys.modules[MODULE].get_model_config(worker.model).param_sync_func = getattr(worker, SAVED)
        setattr(worker, SAVED, None)
        setattr(worker, OFF, False)


def with_hooks_after(finish_train_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(finish_train_step)
    def patched_finish_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = finish_train_step(self, *args, **kwargs)
        put_hooks_back(self)
        return result

    return patched_finish_train_step


PATCH = Patch(
    name="nemo_rl.forward-pre-hook-after-split",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/3773",
    sites=(
        Site(
            MODULE, diagnose, replace={f"{WORKER}.finish_train_step": with_hooks_after}, rebuild=actors_of(WORKER)
        ),
    ),
    changes_numbers=True,
)
