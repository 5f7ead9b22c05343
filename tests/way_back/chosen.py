"""A sequence for each kind of layout, which together do every operation: every test run does them."""

from __future__ import annotations

from .layouts import layouts_here
from .plan import (
    ASIDE,
    COMPANION,
    GENERATION,
    INFERENCE,
    LAST,
    REDUCED,
    REFUSED,
    REPLAYED,
    TRAIN,
    Sequence,
    is_free,
    plan,
)

STEPS, EVALUATES, SAVES, GOES = COMPANION
CHOSEN = tuple(
    Sequence(layout, tuple(operation.strip() for operation in operations.split(";")))
    for layout, operations in (
        (
            "bf16",
            f"step; save; step; load of the weights; evaluation that raises; {REFUSED}; step; save; "
            "load of the first save; step; load of the optimizer",
        ),
        (
            "fp16",
            f"step; save; step that overflows; TrainStep aborted in the optimizer; {REDUCED}; "
            "load that raises, then load",
        ),
        ("bf16, sharded, overlaps", f"step; {TRAIN}"),
        (
            "pp",
            f"{INFERENCE}; step; save; step; {STEPS}; load of the weights; swap of a reference; new model; load",
        ),
        (
            "tp",
            f"abort in the forward pass; abort in the backward pass; step; {GENERATION}; save; "
            "another layout and back; load of the optimizer, then of the weights",
        ),
        (
            "tp, dropout",
            "step; abort in the forward pass; save; TrainStep aborted in the backward pass; load; "
            "log probabilities; second model; step; load without the schedule",
        ),
        (
            "moe",
            f"{INFERENCE}; {GENERATION}; split step; {STEPS}; save; TrainStep aborted after the reduce; "
            f"{REDUCED}; {ASIDE}; {LAST}; second model; load without the schedule; TrainStep aborted {REPLAYED}",
        ),
        (
            "bf16, on disk",
            "step; save; async save; log probabilities; step; finish the async save; "
            f"{REFUSED}; load of the first save",
        ),
        (
            "bf16, sharded, overlaps",
            "step; abandoned async save; abort before the reduce; evaluation; save; step; load; "
            f"{TRAIN}; {TRAIN} that raises",
        ),
        (
            "bf16, fully_reshardable",
            "step; save; step; save that raises; offload and onload; load without the schedule",
        ),
        ("fp32, sharded", "log probabilities; step; save; TrainStep dropped; step; load"),
        (
            "bf16, sharded, overlaps",
            f"{INFERENCE}; {STEPS}; step; {GENERATION}; {EVALUATES}; save; {SAVES}; step; {GOES}; load",
        ),
        ("bf16, large", f"{STEPS}; step; {SAVES}; save; step; {EVALUATES}; {GOES}; load"),
        ("pp, vpp", "abort in the optimizer; abort after the reduce; step; save; step; load"),
        (
            "ep",
            "TrainStep aborted in the forward pass; TrainStep aborted in the backward pass; "
            "TrainStep aborted before the reduce; step; save; load",
        ),
        ("offloaded", "step; save; step; load"),
    )
)


def chosen_here() -> list[Sequence]:
    """Return them without what this Megatron cannot do, and without what is known to differ."""
    free = (
        Sequence(layout, tuple(operation for operation in operations if is_free(operation, layout)))
        for layout, operations in CHOSEN
        if layout in layouts_here()
    )
    return [plan(sequence).sequence for sequence in free]
