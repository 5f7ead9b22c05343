"""A job whose only checkpoint is one for recovery continues from it, and not from the pretrained one.

Symptom   a job with `non_persistent_ckpt_type="global"` ends before its first regular checkpoint. Started again,
          it does not find the one that it has saved for recovery: with `pretrained_checkpoint` it starts from that
          at step 0, silently; in Megatron-Bridge from random weights without it, or without adapters with PEFT.
Upstream  NVIDIA-NeMo/Megatron-Bridge#4900; in 0.3 to 0.5, right in 0.6. Megatron has it, in 0.17 to 0.19.
Seam      while load_checkpoint() runs, and Bridge's setup(), which decides whether to call it,
          checkpoint_exists() of the folder to load from is true where its non-persistent folder has a checkpoint.
          The load itself then takes it, as upstream has it.
Limits    `non_persistent_ckpt_type="local"` is as before: finding a local checkpoint takes a collective.
          A folder for recovery below `save`, where `load` is another folder, is found by Bridge 0.6 alone.
Numbers   change where a job would have started from a pretrained checkpoint: it continues.
Cost      a look for one more file in each load.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import expect_none, unmet
from . import _loads
from ._loads import BRIDGE, FLAG, LOAD, MEGATRON, RECOVERY, Call, Read, Source, call_bridge, call_megatron

EXISTS, FOUND, SETUP = "checkpoint_exists", "_has_global_non_persistent_checkpoint", "setup"

_source: ContextVar[Source] = ContextVar("_source", default=(None, None))
"""The settings of the load that is under way, and the folder that it is to load from."""


def diagnose(begins: str, call: Call, module: ModuleType) -> Verdict:
    """Run the real load_checkpoint() up to the load, where there is a checkpoint for recovery."""
    expect_none(*unmet.attributes(f"{module.__name__}:", EXISTS))
    pretrained, recovered = (_loads.flag_of(LOAD, begins, call, module, each)[0] for each in (False, True))
    if pretrained is not True:
        return Verdict(UNKNOWN, f"expected {LOAD}() to set {FLAG} where it starts from the pretrained checkpoint")
    if recovered:
        return Verdict(NEEDED, f"{LOAD}() starts from the pretrained checkpoint, and not from one for recovery")
    return Verdict(FIXED, f"{LOAD}() takes a checkpoint for recovery before the pretrained one")


def diagnose_setup(module: ModuleType) -> Verdict:
    """Look at what the real setup() asks: it builds the model."""
    if hasattr(module, FOUND):
        return Verdict(FIXED, f"{SETUP}() looks for a checkpoint for recovery")
    expect_none(*unmet.reads(f"{module.__name__}:{SETUP}", EXISTS))
    return Verdict(NEEDED, f"{SETUP}() looks for no checkpoint for recovery")


@contextlib.contextmanager
def _loading_from(source: Source) -> Iterator[None]:
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def note_source(source: Callable[[Any], Read], load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap load_checkpoint(), or Bridge's setup(), which decides whether to call it."""
    read = source(load)

    @functools.wraps(load)
    def patched_load(*args: Any, **kwargs: Any) -> Any:
        with _loading_from(read(args, kwargs)):
            return load(*args, **kwargs)

    return patched_load


def count_recovery(checkpoint_exists: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(checkpoint_exists)
    def patched_checkpoint_exists(checkpoints_path: Any, *args: Any, **kwargs: Any) -> Any:
        found = checkpoint_exists(checkpoints_path, *args, **kwargs)
        settings, folder = _source.get()
        if found or getattr(settings, "non_persistent_ckpt_type", None) != "global" or checkpoints_path != folder:
            return found
        recovery = settings.non_persistent_global_ckpt_dir or (folder and os.path.join(folder, RECOVERY))
        return checkpoint_exists(recovery)

    return patched_checkpoint_exists


def _site(module: str, begins: str, call: Call, source: Callable[[Any], Read]) -> Site:
    return Site(
        module,
        functools.partial(diagnose, begins, call),
        replace={LOAD: functools.partial(note_source, source), EXISTS: count_recovery},
    )


PATCH = Patch(
    name="megatron.recovery-before-pretrained",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4900",
    changes_numbers=True,
    sites=(
        _site(MEGATRON, "unwrap_model", call_megatron, _loads.source_in_megatron),
        _site(BRIDGE, "_load_checkpoint_from_path", call_bridge, _loads.source_in_bridge),
        Site(
            "megatron.bridge.training.setup",
            diagnose_setup,
            replace={SETUP: functools.partial(note_source, _loads.source_in_bridge)},
        ),
    ),
)
