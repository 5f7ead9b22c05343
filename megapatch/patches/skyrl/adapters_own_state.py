"""Each LoRA adapter has Adam's state of its own, whatever its dtype.

Symptom   several adapters are trained in turns, and their parameters are fp32: Adam's moments are those of the
          adapter before, silently. Weights end elsewhere than those of an adapter that is trained by itself.
Upstream  NovaSky-AI/SkyRL#2153 (open); in 0.3.0 and 0.4.0.
Seam      class attributes of AdapterStore that allocate, fill and restore an adapter's slot. While one of them
          runs, the optimizer shows its fp32 shards (shard_fp32_groups) among the main parameters that the store
          walks. With bf16 adapters there are none, and nothing changes.
Limits    only Megatron's distributed optimizer, which is the one that SkyRL's store knows.
Numbers   change with fp32 adapters that are trained in turns: to those of each trained by itself.
Cost      with fp32 adapters: pinned memory for a second copy of the weights and for the moments, as with bf16.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

from ..._mcore.known import arguments_of
from ..._mcore.main_params import children_of
from ..._python.dotted import temporarily_set
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import StandIn, expect_none, running, unmet, with_globals

MODULE = "skyrl.backends.skyrl_train.workers.megatron.adapter_store"
STORE = "AdapterStore"
METHODS = ("_allocate_empty_slot", "_snapshot", "_restore")
WALKED = "shard_fp32_from_float16_groups"
LEFT_OUT = "shard_fp32_groups"


def with_fp32_shards(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def patched_method(*args: Any, **kwargs: Any) -> Any:
        optimizer = arguments_of(signature, args, kwargs).get("optimizer")
        with contextlib.ExitStack() as shown:
            for each in children_of(optimizer):
                fp32 = getattr(each, LEFT_OUT, None)
                if isinstance(fp32, list) and any(fp32):
                    walked = [*(getattr(each, WALKED, None) or []), *fp32]
                    shown.enter_context(temporarily_set(each, **{WALKED: walked}))
            return method(*args, **kwargs)

    return patched_method


# ------------------------------------------------------------------------------------------ the diagnosis
def diagnose(module: ModuleType) -> Verdict:
    """Fill a slot from a made-up optimizer and restore it by the real methods."""
    store = f"{module.__name__}:{STORE}"
    missing = [text for name in METHODS for text in unmet.parameters(f"{store}.{name}", "optimizer")]
    missing += [
        f"{module.__name__}:{name}" for name in ("_iter_buffers", "_new_pinned_like") if not hasattr(module, name)
    ]
    expect_none(*missing)
    with running("a slot's restore"):
        half, full = _restored(module)
    if not half:
        return Verdict(UNKNOWN, "expected a slot to restore the moments of main parameters, and it does not")
    if full:
        return Verdict(FIXED, "a slot restores the moments of fp32 parameters")
    return Verdict(NEEDED, "a slot has no moments of fp32 parameters")


def _restored(module: ModuleType) -> list[bool]:
    """Return whether a moment of a half-precision and of an fp32 parameter comes back."""
    import torch

    parameters = [torch.zeros(1), torch.zeros(1)]
    moments = [torch.zeros(1), torch.zeros(1)]
    optimizer = StandIn(
        **{WALKED: [parameters[:1]], LEFT_OUT: [parameters[1:]]},
        optimizer=StandIn(
            state={parameter: {"exp_avg": moment} for parameter, moment in zip(parameters, moments, strict=True)},
            param_groups=[{"params": parameters, "step": 1}],
        ),
    )
    stand_ins = {"_iter_buffers": lambda chunks: [], "_new_pinned_like": torch.zeros_like}
    kind = vars(module)[STORE]
    store = object.__new__(kind)
    allocate, snapshot, restore = (
        MethodType(with_globals(getattr(kind, name), **stand_ins), store) for name in METHODS
    )
    slot = allocate([], optimizer)
    snapshot(slot, [], optimizer)
    for moment in moments:
        moment.fill_(1.0)
    restore(slot, [], optimizer)
    return [moment.item() == 0.0 for moment in moments]


PATCH = Patch(
    name="skyrl.adapters-own-state",
    doc=__doc__,
    upstream="https://github.com/NovaSky-AI/SkyRL/issues/2153",
    changes_numbers=True,
    sites=(Site(MODULE, diagnose, replace={f"{STORE}.{name}": with_fp32_shards for name in METHODS}),),
)
