"""A start from a pretrained checkpoint does not turn the loads after it into fine-tuning.

Symptom   a job starts from `pretrained_checkpoint`, as `load` has no checkpoint yet, saves, and goes back to its
          last checkpoint in the same process: it gets the weights alone, silently. The step is 0; optimizer,
          schedule and random streams stay as they are. So it is after a start with PEFT in Megatron-Bridge.
Upstream  not reported. Megatron's load_checkpoint() sets args.finetune, in 0.17 to 0.19; Megatron-Bridge's sets
          cfg.checkpoint.finetune, as does the hook that loads the base model of PEFT, in 0.3 to 0.6. Nothing sets
          either back. A job that is started again in a new process loads all.
Seam      the three functions: the setting is as before the call once it has returned or raised. What the call
          loads is not changed.
Limits    a setting that was changed before the patch was applied stays. With PEFT, Bridge's setup() sets it to
          False where `load` has a checkpoint, whatever it was.
Numbers   change in loads after such a start, to those of a process that starts with the same checkpoint.
Cost      nothing in a step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._dotted import find
from ..._mcore.known import arguments_of
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import Idle, StandIn, cannot_run, gone, with_globals

FLAG = "finetune"
LOAD, HOOK, LOAD_FROM = "load_checkpoint", "_create_peft_pre_wrap_hook", "_load_checkpoint_from_path"
BRIDGE = "megatron.bridge.training"
PRETRAINED = "pretrained"


class _Reached(Exception):
    """The code has come to the load itself."""


def diagnose(name: str, begins: str, call: Callable[..., Any], module: ModuleType) -> Verdict:
    """Run the real function up to the load, which begins by the call of the function `begins`."""
    if not hasattr(module, name):
        return gone(name, module)
    settings = StandIn(load="empty", pretrained_checkpoint=PRETRAINED, ckpt_format="torch_dist", finetune=False)
    found = []

    def begin(*args: Any, **kwargs: Any) -> Any:
        found.append(settings.finetune)
        raise _Reached

    stand_ins = {
        begins: begin,
        "checkpoint_exists": lambda folder, *args, **kwargs: folder == PRETRAINED,
        "is_hf_checkpoint_dir": lambda *args: False,
        "_has_global_non_persistent_checkpoint": lambda *args: False,
        "get_args": lambda: settings,
        "print_rank_0": lambda *args: None,
    }
    try:
        call(with_globals(getattr(module, name), **stand_ins), settings)
    except _Reached:
        pass
    except Exception as error:
        return cannot_run(f"{name}()", error)
    if found != [True]:
        return Verdict(UNKNOWN, f"expected {name}() to set {FLAG}, and to load by {begins}()")
    if settings.finetune:
        return Verdict(NEEDED, f"{name}() sets {FLAG} for all later loads")
    return Verdict(FIXED, f"{FLAG} is as before after {name}()")


def _call_bridge(load: Callable[..., Any], settings: Any) -> None:
    load(StandIn(cfg=StandIn(checkpoint=settings)), [], None, None)


def _call_megatron(load: Callable[..., Any], settings: Any) -> None:
    load([], None, None)


def _call_hook(create: Callable[..., Any], settings: Any) -> None:
    create(StandIn(checkpoint=settings, peft=True), StandIn(timers=Idle()))([])


def _keeping(settings: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function, after which the setting is as before, although the function itself has set it."""
    if FLAG not in getattr(settings, "__dict__", ()):
        return function(*args, **kwargs)
    before = settings.finetune
    try:
        return function(*args, **kwargs)
    finally:
        settings.finetune = before


def restore_in_bridge(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(load_checkpoint)

    @functools.wraps(load_checkpoint)
    def patched_load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        settings = find(arguments_of(signature, args, kwargs).get("state"), "cfg.checkpoint")
        return _keeping(settings, load_checkpoint, *args, **kwargs)

    return patched_load_checkpoint


def restore_in_megatron(load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    checkpointing = sys.modules[load_checkpoint.__module__]

    @functools.wraps(load_checkpoint)
    def patched_load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        settings = None
        with contextlib.suppress(Exception):  # the original asks as well, and raises
            settings = checkpointing.get_args()
        return _keeping(settings, load_checkpoint, *args, **kwargs)

    return patched_load_checkpoint


def restore_after_hook(create: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(create)

    @functools.wraps(create)
    def patched_create_peft_pre_wrap_hook(*args: Any, **kwargs: Any) -> Any:
        settings = find(arguments_of(signature, args, kwargs).get("cfg"), "checkpoint")
        hook = create(*args, **kwargs)

        @functools.wraps(hook)
        def patched_hook(*args: Any, **kwargs: Any) -> Any:
            return _keeping(settings, hook, *args, **kwargs)

        return patched_hook

    return patched_create_peft_pre_wrap_hook


PATCH = Patch(
    name="megatron.finetune-for-one-load",
    doc=__doc__,
    upstream=None,
    changes_numbers=True,
    sites=(
        Site(
            "megatron.training.checkpointing",
            functools.partial(diagnose, LOAD, "unwrap_model", _call_megatron),
            replace={LOAD: restore_in_megatron},
        ),
        Site(
            f"{BRIDGE}.checkpointing",
            functools.partial(diagnose, LOAD, LOAD_FROM, _call_bridge),
            replace={LOAD: restore_in_bridge},
        ),
        Site(
            f"{BRIDGE}.setup",
            functools.partial(diagnose, HOOK, LOAD_FROM, _call_hook),
            replace={HOOK: restore_after_hook},
        ),
    ),
)
