"""With torch 2.14 and later, too, checkpoints load at every strictness.

Symptom   with torch 2.14 or later, a load with any --dist-ckpt-strictness but the default, and
          load_tensors_metadata(), end with "TypeError: empty() got an unexpected keyword argument 'strides'".
Upstream  Megatron 0.12 to 0.19 and main: to learn shapes and types from a checkpoint's metadata, Megatron passes
          all that torch keeps of a tensor to torch.empty(). From 2.14 on (pytorch/pytorch#194251) torch keeps the
          strides as well, which torch.empty() does not take.
Seam      the class attribute TorchDistLoadShardedStrategy.load_tensors_metadata. The original gets a copy of the
          metadata that has only the properties which torch.empty() takes. Megatron uses nothing but shape and
          type of these tensors, which have no data.
Limits    code that reads a checkpoint's metadata by itself is not covered.
Cost      in such a load a copy of each tensor's entry, which holds no data. None with torch up to 2.13.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import answering_none, expect_none, running, unmet

MODULE = "megatron.core.dist_checkpointing.strategies.torch"
STRATEGY = f"{MODULE}:TorchDistLoadShardedStrategy"
READER = "_get_filesystem_reader"
"""The function that makes a reader, from 0.13 on; before that Megatron takes torch's class."""
TAKEN = frozenset(("dtype", "layout", "requires_grad", "memory_format", "pin_memory"))
"""The properties that torch.empty() takes: all of torch 2.6 to 2.13 (torch.distributed.checkpoint.metadata)."""


def diagnose(module: ModuleType) -> Verdict:
    """Let the real method make a tensor of properties as torch 2.13 has them, and then as torch 2.14 has them.

    The verdict does not depend on the torch that is here; with an older one the patch has nothing to do.
    """
    method = f"{STRATEGY}.load_tensors_metadata"
    expect_none(
        *unmet.parameters(method, "checkpoint_dir", "metadata"),
        *unmet.parameters(f"{STRATEGY}.load_sharded_metadata", "checkpoint_dir"),
        *unmet.names(f"{STRATEGY}.load_sharded_metadata", "load_tensors_metadata"),
        *unmet.attributes(f"{MODULE}:", "FileSystemReader", "TensorStorageMetadata", "torch"),
    )
    torch = module.torch
    known = {
        "dtype": torch.float32,
        "layout": torch.strided,
        "requires_grad": False,
        "memory_format": torch.contiguous_format,
        "pin_memory": False,
    }

    def load(**properties: Any) -> Any:
        entry = module.TensorStorageMetadata(SimpleNamespace(**properties), torch.Size([2]), [])
        metadata = SimpleNamespace(state_dict_metadata={"made up": entry})
        strategy = object.__new__(answering_none(module.TorchDistLoadShardedStrategy))
        return unpatched(module.TorchDistLoadShardedStrategy.load_tensors_metadata)(strategy, "", metadata)

    with running("load_tensors_metadata()"):
        loaded = list(load(**known))
    if loaded != ["made up"]:
        return Verdict(UNKNOWN, f"expected load_tensors_metadata() to return one tensor; it returns {len(loaded)}")
    needed = "torch.empty() gets strides, which torch keeps from 2.14 on and it does not take"
    with running("load_tensors_metadata()"):
        try:
            load(**known, strides=(1,))
        except TypeError:
            return Verdict(NEEDED, needed)
    return Verdict(FIXED, "load_tensors_metadata() does not pass strides on")


def leave_out_strides(load_tensors_metadata: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_tensors_metadata)
    def patched_load_tensors_metadata(
        self: Any, checkpoint_dir: Any, metadata: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if metadata is None:
            module: Any = sys.modules[MODULE]
            reader = getattr(module, READER, module.FileSystemReader)
            with contextlib.suppress(Exception):  # the original will meet it
                metadata = reader(checkpoint_dir).read_metadata()
        if isinstance(getattr(metadata, "state_dict_metadata", None), dict):
            metadata = _with_taken_properties(metadata)
        return load_tensors_metadata(self, checkpoint_dir, metadata, *args, **kwargs)

    return patched_load_tensors_metadata


def _with_taken_properties(metadata: Any) -> Any:
    entries = metadata.state_dict_metadata
    changed = {}
    for key, entry in entries.items():
        properties = vars(entry.properties) if hasattr(entry, "properties") else {}
        if not TAKEN.issuperset(properties):
            taken = {name: value for name, value in properties.items() if name in TAKEN}
            changed[key] = copy.copy(entry)
            changed[key].properties = SimpleNamespace(**taken)
    if not changed:
        return metadata
    result = copy.copy(metadata)  # other loads may share the original
    result.state_dict_metadata = {**entries, **changed}
    return result


PATCH = Patch(
    name="megatron.strict-loads-with-new-torch",
    doc=__doc__,
    upstream="https://github.com/pytorch/pytorch/pull/194251",
    sites=(
        Site(MODULE, diagnose, replace={"TorchDistLoadShardedStrategy.load_tensors_metadata": leave_out_strides}),
    ),
)
