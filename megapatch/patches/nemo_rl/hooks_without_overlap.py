"""Without overlap_grad_reduce every pipeline stage reduces its gradients once.

Symptom   with several pipeline stages and overlap_grad_reduce off, Megatron's schedules start a reduce on every
          stage but the first (with virtual stages on every one), and Megatron's finalize_model_grads reduces
          again. NeMo-RL sums gradients over data-parallel ranks: they are silently too large by the number of
          ranks or, with the distributed optimizer, partly reduced twice.
Upstream  fixed by NVIDIA-NeMo/Megatron-Bridge#611, in all of Bridge's wheels that we know (0.3.0 and later).
          NeMo-RL 0.4.0 pins an earlier commit, and 0.3 has the same function from nemo.tron.
Seam      the module function, rebound where NeMo-RL's worker holds it by name. It sets the model config's
          no_sync_func and grad_sync_func whatever the setting; without overlap, they are put back as they
          were before the call, which is how upstream leaves them now.
Limits    a model that was set up before the patch keeps its hooks. A custom no_sync_func stays.
Numbers   change on the stages that reduced twice, and so does the gradient's norm.
Cost      once a model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..._mcore.known import CONFIG, arguments_of, is_a
from ...patch import FIXED, NEEDED, Patch, Site, Verdict, unpatched
from .._diagnosis import expect_none, running, unmet

MODULES = ("megatron.bridge.training.setup", "nemo.tron.setup")
UPDATE = "_update_model_config_funcs"
HOOKS = ("no_sync_func", "grad_sync_func")
DDP = "DistributedDataParallel"


def diagnose(module: ModuleType) -> Verdict:
    """Call the real function with an empty DDP and settings without any overlap, and look at the hooks it sets."""
    expect_none(
        *unmet.attributes(f"{module.__name__}:", DDP),
        *unmet.parameters(f"{module.__name__}:{UPDATE}", "model", "model_config", "ddp_config", "optimizer"),
    )
    found = SimpleNamespace(**dict.fromkeys(HOOKS))
    off = SimpleNamespace(overlap_grad_reduce=False, overlap_param_gather=False, align_param_gather=False)
    ddp = object.__new__(getattr(module, DDP))
    with running(f"{UPDATE}()"):
        unpatched(getattr(module, UPDATE))([ddp], found, off, SimpleNamespace(scale_loss=None))
    made = [name for name in HOOKS if getattr(found, name) is not None]
    if made:
        return Verdict(NEEDED, f"{UPDATE}() sets {' and '.join(made)} though overlap_grad_reduce is off")
    return Verdict(FIXED, f"{UPDATE}() sets neither hook where overlap_grad_reduce is off")


def only_with_overlap(update: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(update)

    @functools.wraps(update)
    def patched_update(*args: Any, **kwargs: Any) -> None:
        call = arguments_of(signature, args, kwargs)
        if not is_a(model_config := call.get("model_config"), CONFIG):
            return update(*args, **kwargs)
        before = {name: getattr(model_config, name) for name in HOOKS}
        update(*args, **kwargs)
        if not call["ddp_config"].overlap_grad_reduce:
            for name, hook in before.items():
                setattr(model_config, name, hook)

    return patched_update


PATCH = Patch(
    name="nemo_rl.hooks-without-overlap",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/611",
    sites=tuple(Site(module, diagnose, replace={UPDATE: only_with_overlap}) for module in MODULES),
    changes_numbers=True,
)
