"""Causes of broken rules about what is loaded, kept between steps and saved."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .cause import Cause

STATE: Mapping[str, tuple[Cause, ...]] = MappingProxyType(
    {
        "gradients-arrive": (
            Cause(
                "parameters were frozen, or their part left out, after the model was wrapped",
                "they are those of one adapter, tower or layer; freeze them before the model is wrapped",
            ),
            Cause("their part runs under no_grad() or on a detached input", "they are those of one module"),
        ),
        "kept-between-steps": (
            Cause(
                "weights or moments were swapped or moved out, and other ones put back",
                "the line or the timeline is that of a swap, an offload or a sync",
            ),
            Cause("another optimizer steps the same weights", "found in each step, from the first one on"),
            Cause("an average or a regularizer writes into the weights", "it is meant so: accept the note"),
            Cause(
                "moments are reset after a load, or their state is made again",
                "the sentence says that they were zeroed after it",
                "zeroed after a load",
            ),
        ),
        "loaded-is-there": (
            Cause(
                "the optimizer was loaded before its state was made, which replaced it",
                "moments are zero or missing; load after the first step or after Megatron's dummy step",
                "moments",
            ),
            Cause(
                "something resets or counts the steps after the load",
                "the numbers differ by the steps of this process",
                "has made",
            ),
            Cause(
                "the scheduler adds what it loads to where it is",
                "its steps are the sum of both; load into one that is new",
                "schedule",
            ),
        ),
        "resumed-together": (
            Cause(
                "the load is told to leave out the schedule, or the checkpoint has none",
                "the sentence says that the schedule is at its beginning",
                "its schedule is",
            ),
            Cause(
                "the load is told to leave out the optimizer (--no-load-optim), or the checkpoint has none",
                "the sentence says that the optimizer is at its beginning",
                "its optimizer is",
            ),
        ),
        "fresh-counts": (
            Cause(
                "a step was dropped, and only its gradients were zeroed", "the timeline has an exception before"
            ),
            Cause("log-probabilities are computed in training mode", "found after each forward-only call"),
        ),
        "schedule-moves": (
            Cause("the trainer never calls the scheduler's step()", "the learning rate is that of the first step"),
            Cause("it calls one that belongs to another optimizer", "another schedule moves twice as fast"),
        ),
        "saved-is-trained": (
            Cause(
                "another model's weights, such as a reference's, are in the model as it is saved",
                "the timeline has a swap or a load before the save, and none that puts them back",
            ),
            Cause(
                "copies are saved that are older than the last step", "the copies are named", "copies are saved"
            ),
            Cause(
                "an asynchronous save begins only after a later step",
                "the sentence says so; schedule it before the next step",
                "after its plan",
            ),
        ),
    }
)
"""By rule."""
