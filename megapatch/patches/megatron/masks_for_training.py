"""A causal mask that was made in inference mode does not break the training steps after it.

Symptom   log-probabilities or generation under torch.inference_mode(), then a training step of the same length:
          "RuntimeError: Inference tensors cannot be saved for backward", and so in each later step of that length.
          It takes Megatron's local layers, not those of Transformer Engine.
Upstream  not reported; in 0.12 to 0.15. get_default_causal_mask() is cached by length for the process, and a
          tensor that is made in inference mode stays one. From 0.16 on there is no cache.
Seam      the module function, rebound where the softmax holds it by name: in inference mode it leaves that mode
          while it looks up or makes a mask.
Limits    a mask that was made before the patch was applied stays. So does a mask for sliding windows, which has
          a cache of its own.
Cost      nothing in a training step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, Patch, Site, Verdict, unpatched
from .._diagnosis import expect_none, unmet

MODULE = "megatron.core.transformer.utils"
MASK = "get_default_causal_mask"


def diagnose(module: ModuleType) -> Verdict:
    """Look at the real function: making a mask takes a GPU."""
    expect_none(*unmet.reads(f"{MODULE}:{MASK}", "triu"))
    mask = unpatched(getattr(module, MASK))
    if not hasattr(mask, "cache_clear"):
        return Verdict(FIXED, f"{MASK}() makes each mask again")
    if not unmet.reads(f"{MODULE}:{MASK}", "inference_mode"):
        return Verdict(FIXED, f"{MASK}() leaves inference mode")
    return Verdict(NEEDED, f"{MASK}() keeps masks that it makes in inference mode")


def leave_inference_mode(mask: Any) -> Callable[..., Any]:
    torch = sys.modules["torch"]

    @functools.wraps(mask)
    def patched_get_default_causal_mask(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return mask(*args, **kwargs)
        with torch.inference_mode(False):
            return mask(*args, **kwargs)

    for name in ("cache_clear", "cache_info", "cache_parameters"):
        setattr(patched_get_default_causal_mask, name, getattr(mask, name))
    return patched_get_default_causal_mask


PATCH = Patch(
    name="megatron.masks-for-training",
    doc=__doc__,
    upstream=None,
    sites=(Site(MODULE, diagnose, replace={MASK: leave_inference_mode}),),
)
