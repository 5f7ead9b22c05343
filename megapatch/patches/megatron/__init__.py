"""Patches for Megatron-LM itself, in the order in which they are listed."""

from __future__ import annotations

from ...patch import Patch
from . import (
    aux_loss_over_context_parallel,
    forward_pre_hook,
    fresh_metadata,
    gathered_when_read,
    grad_ready_window,
    groups_destroyed,
    load_offloaded_state,
    nested_no_sync,
    parameters_without_gradients,
    prepare_grads_once,
    reload_offloaded_params,
    rerun_state_dict,
    rerun_transient_fault,
    save_plan_cache,
    strict_loads_with_new_torch,
    torch_fsdp2_finalize,
    train_reentry,
    zero_tokens,
)

PATCHES: tuple[Patch, ...] = (
    aux_loss_over_context_parallel.PATCH,
    forward_pre_hook.PATCH,
    fresh_metadata.PATCH,
    gathered_when_read.PATCH,
    grad_ready_window.PATCH,
    groups_destroyed.PATCH,
    load_offloaded_state.PATCH,
    nested_no_sync.PATCH,
    parameters_without_gradients.PATCH,
    prepare_grads_once.PATCH,
    reload_offloaded_params.PATCH,
    rerun_state_dict.PATCH,
    rerun_transient_fault.PATCH,
    save_plan_cache.PATCH,
    strict_loads_with_new_torch.PATCH,
    torch_fsdp2_finalize.PATCH,
    train_reentry.PATCH,
    zero_tokens.PATCH,
)
