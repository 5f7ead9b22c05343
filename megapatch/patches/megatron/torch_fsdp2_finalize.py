"""Gradients can be finalized with TorchFullyShardedDataParallel, as with the other kinds of data parallelism.

Symptom   with --use-torch-fsdp2 the first step ends with "TypeError: _BaseDataParallel.finish_grad_sync() got an
          unexpected keyword argument 'force_all_reduce'".
Upstream  NVIDIA/Megatron-LM#4953; in 0.16 to 0.18, repaired in 0.19.
Seam      the class attribute TorchFullyShardedDataParallel.finish_grad_sync, which is inherited and takes no
          arguments: the keyword ends here.
Limits    tried on CPU: the real class around a layer, and a whole GPT in pretrain() of 0.18.
Cost      nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._mcore.bucket_groups import DDP
from ...patch import ABSENT, FIXED, NEEDED, Patch, Site, Verdict, unpatched
from .._diagnosis import answering_none, expect_none, running, unmet

MODULE = "megatron.core.distributed"
FSDP2 = "TorchFullyShardedDataParallel"
FINALIZE = f"{MODULE}.finalize_model_grads:finalize_model_grads"
KEYWORD = "force_all_reduce"
"""Which Megatron passes from the release on in which its own DistributedDataParallel takes it."""


def diagnose(package: ModuleType) -> Verdict:
    """Call the real method, which has nothing to do, as Megatron's finalize_model_grads() does."""
    expect_none(
        *unmet.names(FINALIZE, "finish_grad_sync"),
        *unmet.attributes(f"{MODULE}:{FSDP2}", "finish_grad_sync"),
    )
    if missing := unmet.names(FINALIZE, KEYWORD):
        if unmet.parameters(f"{DDP}.finish_grad_sync", KEYWORD):
            return Verdict(ABSENT, f"gradients are finalized without {KEYWORD}")
        expect_none(*missing)
    fsdp2 = object.__new__(answering_none(package.TorchFullyShardedDataParallel))
    finish_grad_sync = unpatched(package.TorchFullyShardedDataParallel.finish_grad_sync)
    with running("finish_grad_sync()"):
        finish_grad_sync(fsdp2)
    try:
        finish_grad_sync(fsdp2, **{KEYWORD: False})
    except TypeError:
        return Verdict(NEEDED, f"finish_grad_sync() does not take the {KEYWORD} that it gets")
    return Verdict(FIXED, f"finish_grad_sync() takes {KEYWORD}")


def take_force_all_reduce(finish_grad_sync: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(finish_grad_sync)
    def patched_finish_grad_sync(self: Any, *args: Any, force_all_reduce: Any = False, **kwargs: Any) -> Any:
        return finish_grad_sync(self, *args, **kwargs)

    return patched_finish_grad_sync


PATCH = Patch(
    name="megatron.torch-fsdp2-finalize",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/pull/4953",
    sites=(Site(MODULE, diagnose, replace={f"{FSDP2}.finish_grad_sync": take_force_all_reduce}),),
)
