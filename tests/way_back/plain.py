"""What plain Megatron does right: the steps after it are the same in processes with megapatch and without."""

from __future__ import annotations

import tempfile

from rigs.cells import run_cells
from rigs.imported import WITHOUT_MEGAPATCH

from .known import WEIGHTS, WITH_OPTIMIZER, WITH_SCHEDULE, aborts
from .layouts import LAYOUTS
from .pictures import differences
from .plan import ABORTS, REFUSED, TRAIN
from .ranks import twins

NEEDED = {
    "megatron.scheduler-after-load": (WITH_SCHEDULE, lambda layout: True),
    "megatron.load-offloaded-state": (WITH_OPTIMIZER, lambda layout: layout.is_sharded),
    "megatron.main-params-after-load": ((WEIGHTS,), lambda layout: layout.has_main_parameters),
    "megatron.save-plan-cache": (("abandoned async save",), lambda layout: True),
    "megatron.parameters-without-gradients": (
        aborts(*ABORTS),
        lambda layout: layout.is_moe or "overlap_grad_reduce" in layout.options,
    ),
    "megatron.train-reentry": ((TRAIN, f"{TRAIN} that raises"), lambda layout: True),
}
"""By patch, the operations for which plain Megatron needs it, in these layouts."""


def is_right(operation, layout):
    """Return whether plain Megatron does this in this layout as it should."""
    needed = any(operation in operations and of(LAYOUTS[layout]) for operations, of in NEEDED.values())
    return not (needed or operation in ("split step", REFUSED) or operation.startswith("TrainStep"))


def run_twins(sequences):
    """Run each sequence with megapatch and without; return, by sequence, what differs on a rank, in words."""
    with tempfile.TemporaryDirectory(prefix="megapatch-way-back-") as folder:
        plain, ours = (
            run_cells(twins, 2, f"{folder}/{name}", sequences, timeout=60 + 10 * len(sequences), env=env)
            for name, env in (("plain", WITHOUT_MEGAPATCH), ("ours", {}))
        )
    return {
        each: {
            kind: words
            for rank in range(2)
            for kind, words in differences(ours[rank][each], plain[rank][each]).items()
        }
        for each in sequences
    }
