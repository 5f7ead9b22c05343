"""The runs that the demo compares. Each is called in every rank's process, with the installed megatron-core."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..patch import Status

CALLS, STEPS = 3, 2
# The distributed optimizer insists on Adam. With a large epsilon Adam is nearly SGD; with the usual one a gradient
# that is wrong by a factor would not show.
PLAIN: dict[str, Any] = {"optimizer": "adam", "lr": 0.5, "optim": {"adam_eps": 1.0}}
OVERLAPPED = {
    **PLAIN,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "use_distributed_optimizer": True,
}


@dataclass
class Outcome:
    """The results of one run on rank 0: losses of each call, errors in Megatron's own words, final parameters, and
    the names of the patches that were applied."""

    losses: list[list[float]] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    patches: list[str] = field(default_factory=list)

    def attempt(self, what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except (AssertionError, KeyError) as error:
            # A KeyError's message is the whole model.
            self.errors.append((what, f"{type(error).__name__}: {error}".splitlines()[0]))


Job = Callable[[int, int], Outcome]
"""The job of every rank: (rank, world size) to outcome."""


# ------------------------------------------------------------------------ the real train(), wheels from 0.17 on
def train_without(rank: int, world_size: int) -> Outcome:
    """Call train() again; after each failure remove its cause by hand, and try again."""
    loop, outcome = _loop(OVERLAPPED), Outcome()
    config = loop.model.config
    outcome.losses.append(loop.train(STEPS))
    outcome.attempt("call 2", lambda: loop.train(STEPS))
    config.no_sync_func = None
    outcome.attempt("call 2, no_sync_func cleared by hand", lambda: loop.train(STEPS))
    config.no_sync_func = None
    sys.modules["megatron.training.global_vars"].get_timers()("interval-time").stop()
    outcome.attempt("call 2, timer stopped by hand as well", lambda: loop.train(STEPS))
    return outcome


def train_again(rank: int, world_size: int) -> Outcome:
    loop = _loop(OVERLAPPED)
    losses = [loop.train(STEPS) for _ in range(CALLS)]
    return Outcome(losses=losses, parameters=loop.model.parameters(), patches=_applied())


def train_once(rank: int, world_size: int) -> Outcome:
    """Train all steps in one call, without overlap: Megatron as it was made to be used."""
    loop = _loop(PLAIN)
    losses = loop.train(CALLS * STEPS)
    return Outcome(
        losses=[losses[first : first + STEPS] for first in range(0, len(losses), STEPS)],
        parameters=loop.model.parameters(),
    )


def _loop(options: Mapping[str, Any]) -> Any:
    from ..testing import MegatronLoop

    return MegatronLoop(_model({**options, "hooks": False}))


# ------------------------------------------------------------------------ the forward pre-hooks, every wheel
def hooks_without(rank: int, world_size: int) -> Outcome:
    model, outcome = _model(OVERLAPPED), Outcome()
    (chunk,) = model.chunks
    outcome.attempt("enable_forward_pre_hook() a second time", chunk.enable_forward_pre_hook)
    chunk.disable_forward_pre_hook()
    outcome.attempt("disable_forward_pre_hook() a second time", chunk.disable_forward_pre_hook)
    return outcome


def hooks_switched(rank: int, world_size: int) -> Outcome:
    """Switch the hooks off and on twice between calls, as around a checkpoint and a weight sync."""
    model, outcome = _model(OVERLAPPED), Outcome()
    (chunk,) = model.chunks
    for call in range(CALLS):
        outcome.losses.append(_steps(model, call))
        for switch in (chunk.disable_forward_pre_hook, chunk.enable_forward_pre_hook):
            switch()
            switch()
    chunk.disable_forward_pre_hook()
    outcome.parameters, outcome.patches = model.parameters(), _applied()
    return outcome


def hooks_never(rank: int, world_size: int) -> Outcome:
    model = _model(PLAIN)
    losses = [_steps(model, call) for call in range(CALLS)]
    return Outcome(losses=losses, parameters=model.parameters())


def _model(options: Mapping[str, Any]) -> Any:
    from ..testing import init_parallel, tiny_gpt

    _quiet()
    init_parallel()
    return tiny_gpt(**options)


def _steps(model: Any, call: int) -> list[float]:
    return [model.train_step(step).loss for step in range(call * STEPS, (call + 1) * STEPS)]


def _applied() -> list[str]:
    """Return the names of the patches that are applied in this process."""
    from .._api import report

    return [entry.patch.name for entry in report().patches if entry.status is Status.APPLIED]


def _quiet() -> None:
    """Discard Megatron's output; a failure comes back as an exception."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
