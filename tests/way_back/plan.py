"""Which operation can follow which, and what counts of a sequence: computed without running it."""

from __future__ import annotations

from typing import NamedTuple

from rigs.megatron.save import minor

from .layouts import LAYOUTS, Layout


class Sequence(NamedTuple):
    """Operations on a model of a layout."""

    layout: str
    operations: tuple[str, ...]


class Step(NamedTuple):
    """A step that counts."""

    kind: str  # one of STEPS
    data: int  # selects the microbatches
    rate: int  # the optimizer has the learning rate of the schedule after this many steps


class WeightsOf(NamedTuple):
    """A load of nothing but the weights that a fresh model has after this program."""

    program: Program


class OptimizerOf(NamedTuple):
    """A load of nothing but the optimizer's state that a fresh model has after this program."""

    program: Program


class RandomOf(NamedTuple):
    """The random streams go on from where this program leaves them in a fresh model."""

    program: Program


class Draws(NamedTuple):
    """An operation of which nothing counts but the random numbers that it draws."""

    operation: str
    data: int


Program = tuple["Step | WeightsOf | OptimizerOf | RandomOf | Draws", ...]
"""The operations that count, in order, from a fresh model on."""


class Then(NamedTuple):
    """The operations so far that count, and the state that the next ones depend on."""

    program: Program = ()
    steps: int = 0  # of the schedule
    rate: int = 0  # as in Step; a load without the schedule brings the rate of the save for one step
    slots: tuple[Then, ...] = ()  # what each finished save has, oldest first
    pending: Then | None = None  # what an asynchronous save has that is under way
    has_stepped: bool = False  # the optimizer of this model; before that there is no state to take apart
    data: int = 0


REPLAYED = "while routes are replayed"
ABORTS = {
    # place: whether all ranks of a pipeline come there together. Elsewhere a stage would wait for the other.
    "in the forward pass": False,
    "in the backward pass": False,
    REPLAYED: False,
    "before the reduce": True,
    "after the reduce": True,
    "in the optimizer": True,
}
PLAIN = "abort"
WAYS = (PLAIN, "TrainStep aborted")
"""An exception out of Megatron's own calls, and out of those of a TrainStep."""

REDUCED = "TrainStep reduced and aborted in the optimizer"
ASIDE = "TrainStep set aside and dropped"
LAST = "TrainStep dropped after its last call"
REFUSED = "load in an open TrainStep"

INFERENCE = "log probabilities in inference mode"
GENERATION = "generation"  # by the model with its cache, as Megatron's own engines run it
COMPANION = (
    "another model steps",
    "another model evaluates",
    "another model saves and loads",
    "another model goes",
)
"""Operations of a model of another size, with its own optimizer, which stays until it goes."""

TRAIN = "train()"
STEPS = ("step", "split step", "step that overflows", TRAIN)
NEUTRAL = (
    "evaluation",
    "evaluation that raises",
    "log probabilities",
    INFERENCE,
    GENERATION,
    *COMPANION,
    "swap of a reference",
    "offload and onload",
    "second model",
    "TrainStep dropped",
    REDUCED,
    ASIDE,
    LAST,
    REFUSED,
    f"{TRAIN} that raises",
    *(f"{way} {place}" for way in WAYS for place in ABORTS),
)
UNRANDOM = ("evaluation", "evaluation that raises", GENERATION, "offload and onload", COMPANION[1], COMPANION[3])
"""Of the neutral operations, those that draw no random numbers: they run nothing in training mode."""
ASYNCHRONOUS = ("async save", "finish the async save", "abandoned async save")
SAVES = ("save", "save that raises", *ASYNCHRONOUS)
LOADS = (
    "load",
    "load of the first save",
    "load without the schedule",
    "load that raises, then load",
    "load of the weights",
    "load of the optimizer, then of the weights",
    "load of the optimizer",
)
MODELS = ("new model", "another layout and back")
OPERATIONS = (*STEPS, *NEUTRAL, *SAVES, *LOADS, *MODELS)


def after(layout: Layout, then: Then, operation: str) -> Then | None:
    """Return what counts after this operation; None if it cannot come here."""
    if not _possible(layout, then, operation):
        return None
    data = then.data + 1
    if operation in STEPS:
        program = (*then.program, Step(operation, then.data, then.rate))
        if operation == "step that overflows":
            return then._replace(program=program, data=data)
        steps = then.steps + 1
        return then._replace(program=program, steps=steps, rate=steps, has_stepped=True, data=data)
    if operation == "save":
        return then._replace(slots=(*then.slots, then), data=data)
    if operation == "async save":
        return then._replace(pending=then, data=data)
    if operation == "finish the async save":
        return then._replace(slots=(*then.slots, then.pending), pending=None, data=data)
    if operation in LOADS:
        saved = then.slots[0 if operation == "load of the first save" else -1]
        if operation == "load of the weights":
            if saved.program == then.program:  # as a swap there and back, it leaves main parameters their bits
                return then._replace(data=data)
            return then._replace(program=(*then.program, WeightsOf(saved.program)), data=data)
        if operation == "load of the optimizer":
            return then._replace(program=(*then.program, OptimizerOf(saved.program)), rate=saved.rate, data=data)
        if operation == "load without the schedule":
            random = (RandomOf(then.program),) if layout.is_random else ()
            return then._replace(program=(*saved.program, *random), rate=saved.rate, data=data)
        return then._replace(program=saved.program, steps=saved.steps, rate=saved.steps, data=data)
    if operation in MODELS:
        return then._replace(program=(), steps=0, rate=0, has_stepped=False, pending=None, data=data)
    if layout.is_random and operation in NEUTRAL and operation not in UNRANDOM:
        return then._replace(program=(*then.program, Draws(operation, then.data)), data=data)
    return then._replace(data=data)


def _possible(layout: Layout, then: Then, operation: str) -> bool:
    if operation == "step that overflows":
        return layout.is_fp16
    if operation.startswith(TRAIN):
        return layout.has_train
    if operation == GENERATION:
        return not (layout.is_pipeline or "cp" in layout.parallel)
    if operation == "offload and onload":
        return layout.offload is None
    if operation in (*SAVES, COMPANION[2]) and not layout.can_save:
        return False
    if operation in ("save", "async save") and _is_half_loaded(layout, then):
        return False
    place = next((place for place in ABORTS if operation.endswith(place)), None)
    if place and layout.is_pipeline and not ABORTS[place]:
        return False
    if place == REPLAYED and not layout.has_replay:
        return False
    if operation == "evaluation that raises":
        return not layout.is_pipeline
    if operation in MODELS:
        return then.pending is None
    if operation in ("async save", "abandoned async save"):
        return layout.is_on_disk and then.pending is None and then.has_stepped
    if operation == "finish the async save":
        return then.pending is not None
    if operation in ("save", "save that raises"):
        return then.has_stepped and then.pending is None
    if operation == "load of the weights":
        # The offloaded optimizer's copies are not all where a reference could set them.
        return bool(then.slots) and layout.offload is None
    if operation == "load of the optimizer":
        # A distributed checkpoint is read with its weights in place, and a sharded one's moments are only there.
        return bool(then.slots) and then.has_stepped and not (layout.is_sharded or layout.is_on_disk)
    return operation not in (*LOADS, REFUSED) or bool(then.slots)


def _is_half_loaded(layout: Layout, then: Then) -> bool:
    """Return whether weights were loaded and not trained on: until then main parameters are those of before."""
    last = next((part for part in reversed(then.program) if not isinstance(part, (Draws, RandomOf))), None)
    return layout.has_main_parameters and isinstance(last, WeightsOf)


class Planned(NamedTuple):
    """A sequence without the operations that cannot come where they are, and what counts of it."""

    sequence: Sequence
    then: Then


def plan(sequence: Sequence) -> Planned:
    """Leave out what cannot come where it is; return the rest, and what counts of it."""
    layout, then, kept = LAYOUTS[sequence.layout], Then(), []
    for operation in sequence.operations:
        if (following := after(layout, then, operation)) is not None:
            then = following
            kept.append(operation)
    return Planned(Sequence(sequence.layout, tuple(kept)), then)


def is_free(operation: str, layout: str) -> bool:
    """Return whether nothing is known to be left of an operation: see "known" in docs/process-state.md.

    Without a TrainStep nobody tells Megatron that a step was dropped: losses, biases and routes of experts are
    left, and with fp16 a count of the loss scale. 0.15 cannot offload an optimizer.
    """
    its, aborts = LAYOUTS[layout], [f"{PLAIN} {place}" for place in ABORTS]
    known = aborts if its.is_moe else [f"{PLAIN} in the optimizer"] if its.is_fp16 else []
    return operation not in (*known, *["offload and onload"] * (minor() == 15))
