"""The source of a load by Megatron's or Megatron-Bridge's load_checkpoint(), and a run of it on stand-ins."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..._mcore.known import arguments_of
from ..._python.dotted import find
from ...patch import NotAsExpected
from .._diagnosis import Idle, StandIn, expect_none, running, unmet, with_globals

FLAG, LOAD = "finetune", "load_checkpoint"
MEGATRON, BRIDGE = "megatron.training.checkpointing", "megatron.bridge.training.checkpointing"
FOLDER, PRETRAINED, RECOVERY = "empty", "pretrained", "non_persistent"

Source = tuple[Any, Any]
"""The settings that a load goes by, and the folder that it loads from; None where there is none."""
Read = Callable[[tuple[Any, ...], Mapping[str, Any]], Source]


def source_in_bridge(function: Callable[..., Any]) -> Read:
    """Return a function of the arguments of load_checkpoint(), or of setup()."""
    signature = inspect.signature(function)

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Source:
        settings = find(arguments_of(signature, args, kwargs).get("state"), "cfg.checkpoint")
        return settings, find(settings, "load")

    return read


def source_in_megatron(load_checkpoint: Callable[..., Any]) -> Read:
    """Return a function of the arguments of load_checkpoint()."""
    checkpointing, signature = sys.modules[load_checkpoint.__module__], inspect.signature(load_checkpoint)

    def read(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Source:
        settings = None
        with contextlib.suppress(Exception):  # the original asks as well, and raises
            settings = checkpointing.get_args()
        name = arguments_of(signature, args, kwargs).get("load_arg", "load")
        return settings, find(settings, name) if isinstance(name, str) else None

    return read


# ------------------------------------------------------------------------------------------ a run on stand-ins
class _Reached(Exception):
    """The code has come to the load itself."""


Call = Callable[[Callable[..., Any], Any], None]
"""Calls a function with stand-ins for its arguments, of which the settings are one."""


def flag_of(name: str, begins: str, call: Call, module: ModuleType, recovery: bool = False) -> Source:
    """Run the real function up to the load, which begins by the call of the function `begins`.

    Only a pretrained checkpoint is there, and on request one for recovery. Return the flag as the load begins,
    and the one that is left.
    """
    expect_none(*unmet.attributes(f"{module.__name__}:", name))
    settings = StandIn(load=FOLDER, pretrained_checkpoint=PRETRAINED, ckpt_format="torch_dist", finetune=False)
    settings.non_persistent_ckpt_type, settings.non_persistent_global_ckpt_dir = "global", RECOVERY
    there, found = (PRETRAINED, RECOVERY) if recovery else (PRETRAINED,), []

    def begin(*args: Any, **kwargs: Any) -> Any:
        found.append(settings.finetune)
        raise _Reached

    stand_ins = {
        begins: begin,
        "checkpoint_exists": lambda folder, *args, **kwargs: folder in there,
        "is_hf_checkpoint_dir": lambda *args: False,
        "_has_global_non_persistent_checkpoint": lambda *args: recovery,
        "get_args": lambda: settings,
        "print_rank_0": lambda *args: None,
    }
    with running(f"{name}()"), contextlib.suppress(_Reached):
        call(with_globals(getattr(module, name), **stand_ins), settings)
    if not found:
        raise NotAsExpected(f"expected {name}() to load by {begins}()")
    return found[0], settings.finetune


def call_bridge(load: Callable[..., Any], settings: Any) -> None:
    load(StandIn(cfg=StandIn(checkpoint=settings)), [], None, None)


def call_megatron(load: Callable[..., Any], settings: Any) -> None:
    load([], None, None)


def call_hook(create: Callable[..., Any], settings: Any) -> None:
    create(StandIn(checkpoint=settings, peft=True), StandIn(timers=Idle()))([])
