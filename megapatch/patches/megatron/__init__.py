"""Patches for Megatron-LM itself, in the order in which they are listed."""

from __future__ import annotations

from ...patch import Patch
from . import (
    forward_pre_hook,
    fresh_metadata,
    gathered_when_read,
    grad_ready_window,
    nested_no_sync,
    prepare_grads_once,
    reload_offloaded_params,
    rerun_state_dict,
    rerun_transient_fault,
    save_plan_cache,
    strict_loads_with_new_torch,
    train_reentry,
)

PATCHES: tuple[Patch, ...] = (
    forward_pre_hook.PATCH,
    fresh_metadata.PATCH,
    gathered_when_read.PATCH,
    grad_ready_window.PATCH,
    nested_no_sync.PATCH,
    prepare_grads_once.PATCH,
    reload_offloaded_params.PATCH,
    rerun_state_dict.PATCH,
    rerun_transient_fault.PATCH,
    save_plan_cache.PATCH,
    strict_loads_with_new_torch.PATCH,
    train_reentry.PATCH,
)
