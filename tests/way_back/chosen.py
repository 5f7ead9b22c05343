"""A sequence for each kind of layout, which together do every operation: every test run does them."""

from __future__ import annotations

from .known import is_free
from .layouts import layouts_here
from .plan import ASIDE, COMPANION, GENERATION, INFERENCE, LAST, REDUCED, REFUSED, REPLAYED, TRAIN, Sequence, plan

CHOSEN = (
    Sequence(
        "bf16",
        (
            "step",
            "save",
            "step",
            "load of the weights",
            "evaluation that raises",
            REFUSED,
            "step",
            "save",
            "load of the first save",
            "step",
            "load of the optimizer",
        ),
    ),
    Sequence(
        "fp16",
        (
            "step",
            "save",
            "step that overflows",
            "TrainStep aborted in the optimizer",
            REDUCED,
            "load that raises, then load",
        ),
    ),
    Sequence("bf16, sharded, overlaps", ("step", TRAIN)),
    Sequence(
        "pp",
        (
            INFERENCE,
            "step",
            "save",
            "step",
            COMPANION[0],
            "load of the weights",
            "swap of a reference",
            "new model",
            "load",
        ),
    ),
    Sequence(
        "tp",
        (
            "abort in the forward pass",
            "abort in the backward pass",
            "step",
            GENERATION,
            "save",
            "another layout and back",
            "load of the optimizer, then of the weights",
        ),
    ),
    Sequence(
        "tp, dropout",
        (
            "step",
            "abort in the forward pass",
            "save",
            "TrainStep aborted in the backward pass",
            "load",
            "log probabilities",
            "second model",
            "step",
            "load without the schedule",
        ),
    ),
    Sequence(
        "moe",
        (
            INFERENCE,
            GENERATION,
            "split step",
            COMPANION[0],
            "save",
            "TrainStep aborted after the reduce",
            REDUCED,
            ASIDE,
            LAST,
            "second model",
            "load without the schedule",
            f"TrainStep aborted {REPLAYED}",
        ),
    ),
    Sequence(
        "bf16, on disk",
        (
            "step",
            "save",
            "async save",
            "log probabilities",
            "step",
            "finish the async save",
            REFUSED,
            "load of the first save",
        ),
    ),
    Sequence(
        "bf16, sharded, overlaps",
        (
            "step",
            "abandoned async save",
            "abort before the reduce",
            "evaluation",
            "save",
            "step",
            "load",
            TRAIN,
            f"{TRAIN} that raises",
        ),
    ),
    Sequence(
        "bf16, fully_reshardable",
        ("step", "save", "step", "save that raises", "offload and onload", "load without the schedule"),
    ),
    Sequence("fp32, sharded", ("log probabilities", "step", "save", "TrainStep dropped", "step", "load")),
    Sequence(
        "bf16, sharded, overlaps",
        (
            INFERENCE,
            COMPANION[0],
            "step",
            GENERATION,
            COMPANION[1],
            "save",
            COMPANION[2],
            "step",
            COMPANION[3],
            "load",
        ),
    ),
    Sequence(
        "bf16, large", (COMPANION[0], "step", COMPANION[2], "save", "step", COMPANION[1], COMPANION[3], "load")
    ),
    Sequence("pp, vpp", ("abort in the optimizer", "abort after the reduce", "step", "save", "step", "load")),
    Sequence(
        "ep",
        (
            "TrainStep aborted in the forward pass",
            "TrainStep aborted in the backward pass",
            "TrainStep aborted before the reduce",
            "step",
            "save",
            "load",
        ),
    ),
    Sequence("offloaded", ("step", "save", "step", "load")),
)


def chosen_here() -> list[Sequence]:
    """Return them without what this Megatron cannot do, and without what is in known.py."""
    free = (
        Sequence(layout, tuple(operation for operation in operations if is_free(operation, layout)))
        for layout, operations in CHOSEN
        if layout in layouts_here()
    )
    return [plan(sequence).sequence for sequence in free]
