"""The layouts of the grid, which are those of the way back, and groups of them."""

from __future__ import annotations

from rigs.megatron.save import minor
from way_back.layouts import LAYOUTS, ON_DISK

BUCKETS = "dp_reshardable"
SKIPPED = ("bf16, on disk", "bf16, fully_reshardable")  # here every layout is saved on disk
LAYOUTS = {
    name: layout if layout.is_on_disk else layout._replace(saved=BUCKETS if layout.is_sharded else ON_DISK)
    for name, layout in LAYOUTS.items()
    if name not in SKIPPED
}

DENSE = ("fp32", "bf16", "fp16")
SHARDS = ("fp32, sharded", "fp16, sharded", "bf16, sharded")
OVERLAPPED = ("bf16, overlapped reduce", "fp32, sharded, overlaps", "bf16, sharded, overlaps")
PARALLEL = ("pp", "pp, vpp", "pp, tied", "tp", "cp", "cp, moe", "moe", "ep")
OFFLOADED = ("offloaded", "precision-aware")
EVERY = (*DENSE, *SHARDS, *OVERLAPPED, *PARALLEL, *OFFLOADED, "tp, dropout")
HALF = ("bf16", "fp16", "bf16, sharded", "bf16, sharded, overlaps", "tp", "ep")
"""With main parameters beside the model's."""
FEW = ("fp32", "bf16, sharded, overlaps", "pp, vpp")
ON_DISKS = ("bf16", "bf16, sharded, overlaps", "pp, vpp", "ep")


def here(names):
    """Return those of these layouts that this Megatron has."""
    return [name for name in names if minor() >= LAYOUTS[name].oldest]
