"""A load of a step that is asked for takes this step, whatever checkpoint for recovery is newer.

Symptom   with `ckpt_step` a job goes back to step 2, and gets step 4, silently: the non-persistent checkpoint, as
          it is not older than the step that is asked for.
Upstream  NVIDIA-NeMo/Megatron-Bridge#5260; in 0.3 to 0.6, right on its main. Megatron has it, in 0.17 to 0.19.
Seam      the function that looks for non-persistent checkpoints: it finds the step that is asked for and no other.
          _load_base_checkpoint(), which calls it, has the settings.
Limits    a step that only a checkpoint for recovery has is loaded from that one, as before.
Numbers   change in such loads, to those of the step that is asked for.
Cost      nothing in a step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from ..._mcore.known import arguments_of
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import StandIn, expect_none, running, unmet, with_globals
from ._loads import BRIDGE, FOLDER, MEGATRON, RECOVERY

LOAD, FIND, LOAD_RECOVERY = (
    "_load_base_checkpoint",
    "_get_non_persistent_iteration",
    "_load_non_persistent_base_checkpoint",
)
SETTINGS = {MEGATRON: "args", BRIDGE: "ckpt_cfg"}
"""The parameter of _load_base_checkpoint() that has the settings."""

_asked: ContextVar[Any] = ContextVar("_asked", default=None)


class _Chosen(Exception):
    """The code has chosen a checkpoint."""


def diagnose(module: ModuleType) -> Verdict:
    """Run the real function up to its choice, where step 2 is asked for and one for recovery is of step 4."""
    expect_none(*unmet.attributes(f"{module.__name__}:", LOAD, FIND))
    settings = StandIn(non_persistent_ckpt_type="global", non_persistent_global_ckpt_dir=RECOVERY, ckpt_step=2)

    def chosen(which: str) -> Callable[..., Any]:
        def choose(*args: Any, **kwargs: Any) -> Any:
            raise _Chosen(which)

        return choose

    stand_ins = {
        FIND: lambda *args, **kwargs: 4,
        LOAD_RECOVERY: chosen(RECOVERY),
        "get_checkpoint_name": chosen("asked"),
        "_resolve_checkpoint_iteration": lambda load_dir, ckpt_step_override: (ckpt_step_override, False),
        "_get_global_non_persistent_checkpoint_dirs": lambda *args: (RECOVERY,),
        "file_exists": lambda *args: False,
        "set_loaded_iteration": lambda *args: None,
        "print_rank_0": lambda *args: None,
    }
    load = with_globals(getattr(module, LOAD), **stand_ins)
    groups = {"pg_collection": None} if "pg_collection" in inspect.signature(load).parameters else {}
    with running(f"{LOAD}()"):
        try:
            load(FOLDER, settings, **groups)
        except _Chosen as chosen_one:
            if str(chosen_one) == RECOVERY:
                return Verdict(
                    NEEDED, f"{LOAD}() takes a newer checkpoint for recovery than the step that is asked for"
                )
            return Verdict(FIXED, f"{LOAD}() takes the step that is asked for")
    return Verdict(
        UNKNOWN, f"expected {LOAD}() to choose a checkpoint by {LOAD_RECOVERY}() or get_checkpoint_name()"
    )


def note_step(parameter: str, load: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(load)

    @functools.wraps(load)
    def patched_load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        call = arguments_of(signature, args, kwargs)
        step = None if call.get("ignore_ckpt_step") else getattr(call.get(parameter), "ckpt_step", None)
        token = _asked.set(step)
        try:
            return load(*args, **kwargs)
        finally:
            _asked.reset(token)

    return patched_load_base_checkpoint


def find_asked_step(find: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(find)
    def patched_get_non_persistent_iteration(*args: Any, **kwargs: Any) -> Any:
        found, asked = find(*args, **kwargs), _asked.get()
        return -1 if isinstance(asked, int) and asked > 0 and found != asked else found

    return patched_get_non_persistent_iteration


PATCH = Patch(
    name="megatron.asked-step-loaded",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5260",
    changes_numbers=True,
    sites=tuple(
        Site(module, diagnose, replace={LOAD: functools.partial(note_step, parameter), FIND: find_asked_step})
        for module, parameter in SETTINGS.items()
    ),
)
