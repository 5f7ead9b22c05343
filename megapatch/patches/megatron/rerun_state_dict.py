"""A checkpoint's structure does not depend on whether a rerun is pending.

Symptom   with --ckpt-assume-constant-structure and the rerun state machine on (both modes; validate_results is
          the default from 0.14 on), the checkpoint saved because of a fault is written without an error and cannot
          be loaded: "Missing key in checkpoint state_dict: rerun_state_machine_state/shard_0_2" (rank, number of
          ranks). Megatron reuses the plan of the first save, made when there was no rerun state to save.
          A checkpoint that holds an idle rerun state cannot be loaded with --dist-ckpt-strictness raise_all:
          "Missing keys (for all ranks): {'rerun_state_machine_state'}", as Megatron asks only for a pending one.
Upstream  NVIDIA/Megatron-LM#4448 (issue #4378): checkpoints in 0.14.0 to 0.17.1, and in checkouts of main from
          before it that call themselves 0.18.0; 0.12 and 0.13 have always saved the state.
          #7222 (open; issue #7428): strict loads in every version.
Seam      the class attribute RerunStateMachine.state_dict. An enabled machine returns its state for every
          torch_dist checkpoint; the original builds it, without looking at the data iterators as long as no
          rerun is pending. A machine that is DISABLED returns none, as from 0.18 on.
          The module function that raises for a strict load, looked up by name at every call. Where it would raise,
          rerun_state_machine_state is left out of the missing keys passed to it; LOG_... and RETURN_... strictness
          name the key as before. Every other key raises as before.
Limits    where load_checkpoint ignores even a pending state (changed parallel sizes, --finetune), a strict load no
          longer objects to that.
          Tools without Megatron cannot read the common state of these checkpoints, as with 0.18: it pickles
          RerunMode and RerunState. Megatron reads them, patched or not, except with raise_all.
          A checkpoint saved before, without the state, loads as before; a job resumed from it saves the state.
Cost      one small object a rank in each checkpoint; nothing in training.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...patch import ABSENT, FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import answering_none, expect_none, running, unmet

MACHINE_MODULE = "megatron.core.rerun_state_machine"
STATE_DICT = f"{MACHINE_MODULE}:RerunStateMachine.state_dict"
STRICT_MODULE = "megatron.core.dist_checkpointing.validation"
KEY = "rerun_state_machine_state"
FORMAT = "torch_dist"
"""The only format that can hold a state which differs between ranks."""


# ------------------------------------------------------------------------------------------ saving
def diagnose_saving(module: ModuleType) -> Verdict:
    """Ask a machine that cannot be saved, in which no rerun is pending, for its state.

    With the defect it returns None at once; without it, it starts building the state.
    """
    expect_none(
        *unmet.parameters(STATE_DICT, "data_iterator", "ckpt_format"),
        *unmet.names(STATE_DICT, KEY, "ShardedObject"),
        *unmet.reads(STATE_DICT, "mode", "state"),
        *unmet.attributes(f"{MACHINE_MODULE}:RerunMode", "DISABLED", "VALIDATE_RESULTS"),
        *unmet.attributes(f"{MACHINE_MODULE}:RerunState", "NOT_RUNNING_YET"),
    )
    machine = object.__new__(answering_none(module.RerunStateMachine))
    machine.mode, machine.state = module.RerunMode.VALIDATE_RESULTS, module.RerunState.NOT_RUNNING_YET
    machine._sanitize_data_iterators = lambda *args: []
    machine.error_injector = SimpleNamespace(state_dict=_build)
    state: Any = {}
    with running("state_dict()"), contextlib.suppress(_Building):
        state = unpatched(module.RerunStateMachine.state_dict)(machine, None, FORMAT)
    no_force = unmet.parameters(STATE_DICT, "force")
    if state is not None:
        if no_force:
            return Verdict(ABSENT, "this version has always saved the rerun state")
        return Verdict(FIXED, "state_dict() builds a state although no rerun is pending")
    if no_force:
        return Verdict(UNKNOWN, f"state_dict() returns None; expected but not found: {no_force[0]}")
    return Verdict(NEEDED, "state_dict() returns None as long as no rerun is pending")


class _Building(Exception):
    """The state is being built, which takes a process group: a diagnosis knows enough."""


def _build() -> None:
    raise _Building


def always_emit_shard(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(state_dict)
    def patched_state_dict(
        self: Any, data_iterator: Any, ckpt_format: str, force: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if not isinstance(ckpt_format, str) or not isinstance(force, bool) or force:
            return state_dict(self, data_iterator, ckpt_format, force, *args, **kwargs)
        if self.mode.name == "DISABLED":
            return None
        state = state_dict(self, data_iterator, ckpt_format, force, *args, **kwargs)
        if state is None and ckpt_format == FORMAT:
            # No rerun is pending, so there is nothing to replay, and iterators may be of any kind.
            return state_dict(self, None, ckpt_format, True, *args, **kwargs)
        return state

    return patched_state_dict


# ------------------------------------------------------------------------------------------ strict loading
def diagnose_loading(module: ModuleType) -> Verdict:
    """Let the real function report the rerun state's key as the only missing one."""
    report = f"{STRICT_MODULE}:maybe_report_missing_and_unexpected_keys"
    expect_none(
        *unmet.parameters(report, "missing_keys", "unexpected_keys", "raise_error"),
        *unmet.names(f"{STRICT_MODULE}:validate_integrity_and_strict_load", report.partition(":")[2]),
        *unmet.attributes(f"{STRICT_MODULE}:", "CheckpointingException"),
    )

    def raises(key: str) -> bool:
        try:
            unpatched(module.maybe_report_missing_and_unexpected_keys)({key}, set(), True)
        except module.CheckpointingException:
            return True
        return False

    with running("maybe_report_missing_and_unexpected_keys()"):
        about_others, about_state = raises("some other key"), raises(KEY)
    if not about_others:
        return Verdict(UNKNOWN, "expected missing keys to raise a CheckpointingException, and they do not")
    if about_state:
        return Verdict(NEEDED, f"a strict load raises for {KEY}, which is only asked for while a rerun is pending")
    return Verdict(FIXED, f"a strict load does not raise for {KEY}")


def forgive_idle_state(report: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(report)
    def patched_report(
        missing_keys: Any, unexpected_keys: Any, raise_error: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(missing_keys, (set, list, tuple)) and KEY in missing_keys and raise_error:
            missing_keys = set(missing_keys) - {KEY}
        return report(missing_keys, unexpected_keys, raise_error, *args, **kwargs)

    return patched_report


PATCH = Patch(
    name="megatron.rerun-state-dict",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/4448",
    sites=(
        Site(MACHINE_MODULE, diagnose_saving, replace={"RerunStateMachine.state_dict": always_emit_shard}),
        Site(
            STRICT_MODULE,
            diagnose_loading,
            replace={"maybe_report_missing_and_unexpected_keys": forgive_idle_state},
        ),
    ),
)
