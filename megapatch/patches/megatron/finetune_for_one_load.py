"""A start from a pretrained checkpoint does not turn the loads after it into fine-tuning.

Symptom   a job starts from `pretrained_checkpoint`, as `load` has no checkpoint yet, saves, and goes back to its
          last checkpoint in the same process: it gets the weights alone, silently. The step is 0; optimizer,
          schedule and random streams stay as they are. So it is after a start with PEFT in Megatron-Bridge.
Upstream  not reported. Megatron's load_checkpoint() sets args.finetune, in 0.17 to 0.19; Megatron-Bridge's sets
          cfg.checkpoint.finetune, as does the hook that loads the base model of PEFT, in 0.3 to 0.6. Nothing sets
          either back. A job that is started again in a new process loads all.
Seam      the three functions. The setting stays as they leave it, as trainers read it after a load. The next load
          from the same folder begins by setting it back to what it was before, unless it has changed since then.
          What the call itself loads is not changed.
Limits    a setting that was changed before the patch was applied stays. With PEFT, Bridge's setup() sets it to
          False where `load` has a checkpoint, whatever it was. A load from another folder goes by the setting as
          it is. A trainer that sets it to True again after such a start is not seen: to load the weights alone of
          its own checkpoint, it can name the folder otherwise, as with a slash at its end.
Numbers   change in loads after such a start, to those of a process that starts with the same checkpoint.
Cost      nothing in a step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.known import arguments_of
from ..._mcore.side_table import SideTable
from ..._python.dotted import find
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from . import _loads
from ._loads import BRIDGE, FLAG, LOAD, MEGATRON, Call, Read, call_bridge, call_hook, call_megatron

HOOK, LOAD_FROM, SETUP = (
    "_create_peft_pre_wrap_hook",
    "_load_checkpoint_from_path",
    "megatron.bridge.training.setup",
)

_starts = SideTable()
"""Of settings that a start has changed: the value before, the one that was left, and the folder to load from."""


def diagnose(name: str, begins: str, call: Call, module: ModuleType) -> Verdict:
    """Run the real function up to the load."""
    begun, left = _loads.flag_of(name, begins, call, module)
    if begun is not True:
        return Verdict(UNKNOWN, f"expected {name}() to set {FLAG} before it loads by {begins}()")
    if left:
        return Verdict(NEEDED, f"{name}() sets {FLAG} for all later loads")
    return Verdict(FIXED, f"{FLAG} is as before after {name}()")


def put_back(settings: Any, folder: Any) -> None:
    """Set the flag to its value from before a start from this folder, unless somebody else has set it."""
    before, left, source = _starts.get(settings, (None, None, None))
    if source is not None and source == folder:
        _starts.pop(settings)
        if settings.finetune is left:
            settings.finetune = before


@contextlib.contextmanager
def noting(settings: Any, folder: Any) -> Any:
    """Note the flag's value from before the call of upstream's that is made here, if the call changes it."""
    before = find(settings, FLAG)
    try:
        yield
    finally:
        if find(settings, FLAG) is not before:
            with contextlib.suppress(TypeError):  # settings that take no weak reference
                _starts.set(settings, (before, settings.finetune, folder))


def restore(source: Callable[[Any], Read], load_checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    read = source(load_checkpoint)

    @functools.wraps(load_checkpoint)
    def patched_load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        settings, folder = read(args, kwargs)
        put_back(settings, folder)
        with noting(settings, folder):
            return load_checkpoint(*args, **kwargs)

    return patched_load_checkpoint


def restore_after_hook(create: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(create)

    @functools.wraps(create)
    def patched_create_peft_pre_wrap_hook(*args: Any, **kwargs: Any) -> Any:
        settings = find(arguments_of(signature, args, kwargs).get("cfg"), "checkpoint")
        hook = create(*args, **kwargs)

        @functools.wraps(hook)
        def patched_hook(*args: Any, **kwargs: Any) -> Any:
            with noting(settings, find(settings, "load")):
                return hook(*args, **kwargs)

        return patched_hook

    return patched_create_peft_pre_wrap_hook


PATCH = Patch(
    name="megatron.finetune-for-one-load",
    doc=__doc__,
    upstream=None,
    changes_numbers=True,
    sites=(
        Site(
            MEGATRON,
            functools.partial(diagnose, LOAD, "unwrap_model", call_megatron),
            replace={LOAD: functools.partial(restore, _loads.source_in_megatron)},
        ),
        Site(
            BRIDGE,
            functools.partial(diagnose, LOAD, LOAD_FROM, call_bridge),
            replace={LOAD: functools.partial(restore, _loads.source_in_bridge)},
        ),
        Site(
            SETUP,
            functools.partial(diagnose, HOOK, LOAD_FROM, call_hook),
            replace={HOOK: restore_after_hook},
        ),
    ),
)
