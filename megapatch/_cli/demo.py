"""megapatch demo: Megatron called again and again, with and without megapatch, on two CPU ranks.

Everything here is the installed megatron-core at work; where a wheel has no train(), what needs it is left out.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._version import __version__
from .._versions import TESTED, find_module, here, too_old

RANKS = 2
CALLS, STEPS = 3, 2
TOLERANCE = 1e-5
"""Largest difference of a parameter between two runs that count as equal: the order of float32 sums."""

UNPATCHED = {"MEGAPATCH_DISABLE": "*"}
# With a large epsilon Adam, which the distributed optimizer insists on, is nearly SGD: with the usual one a
# gradient that is wrong by a factor would not show.
PLAIN: dict[str, Any] = {"optimizer": "adam", "lr": 0.5, "optim": {"adam_eps": 1.0}}
OVERLAPPED = {
    **PLAIN,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "use_distributed_optimizer": True,
}


@dataclass
class Outcome:
    """What one run did on rank 0: losses of each call, errors in Megatron's own words, final parameters."""

    losses: list[list[float]] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)

    def attempt(self, what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except (AssertionError, KeyError) as error:
            # A KeyError's message is the whole model.
            self.errors.append((what, f"{type(error).__name__}: {error}".splitlines()[0]))


Job = Callable[[int, int], Outcome]
"""What every rank runs: (rank, world size) to outcome."""


# ------------------------------------------------------------------------ the real train(), wheels from 0.17 on
def train_without(rank: int, world_size: int) -> Outcome:
    """Call train() again; after each failure clear away by hand what it tripped over, and try again."""
    loop, outcome = _loop(OVERLAPPED), Outcome()
    config = loop.model.config
    outcome.losses.append(loop.train(STEPS))
    outcome.attempt("call 2", lambda: loop.train(STEPS))
    config.no_sync_func = None
    outcome.attempt("call 2, no_sync_func cleared by hand", lambda: loop.train(STEPS))
    config.no_sync_func = None
    sys.modules["megatron.training.global_vars"].get_timers()("interval-time").stop()
    outcome.attempt("call 2, timer stopped by hand, too", lambda: loop.train(STEPS))
    return outcome


def train_again(rank: int, world_size: int) -> Outcome:
    loop = _loop(OVERLAPPED)
    losses = [loop.train(STEPS) for _ in range(CALLS)]
    return Outcome(losses=losses, parameters=loop.model.parameters())


def train_once(rank: int, world_size: int) -> Outcome:
    """All steps in one call, without overlap: Megatron as it was made to be used."""
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
    """Between calls the hooks go off and on twice, as around a checkpoint and a weight sync."""
    model, outcome = _model(OVERLAPPED), Outcome()
    (chunk,) = model.chunks
    for call in range(CALLS):
        outcome.losses.append(_steps(model, call))
        for switch in (chunk.disable_forward_pre_hook, chunk.enable_forward_pre_hook):
            switch()
            switch()
    chunk.disable_forward_pre_hook()
    outcome.parameters = model.parameters()
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


def _quiet() -> None:
    """Send what Megatron prints away; a failure comes back as an exception."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


# ------------------------------------------------------------------------ the story
def main() -> int:
    """Run the demo; the exit code is 0 only if the repaired run equals the plain one."""
    modules = {"torch": "torch", "megatron-core": "megatron.core"}
    if lacking := [name for name, module in modules.items() if find_module(module) is None]:
        return _cannot(f'the demo needs {" and ".join(lacking)}: pip install "megapatch[demo]"')
    versions = {"megapatch": __version__, **here()}
    if too_old("megatron-core", version := versions["megatron-core"]):
        return _cannot(f"the demo needs megatron-core {TESTED['megatron-core'][0]} or later; this is {version}")
    from ..testing import RanksFailed, megatron_training_available

    started = time.monotonic()
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    try:
        same = _demonstrate_train() if megatron_training_available() else _demonstrate_hooks()
    except RanksFailed as error:
        if module := re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", str(error)):
            return _cannot(
                f"importing this megatron-core needs {module[1]}, which is not installed: pip install it"
            )
        print(f"the run failed:\n{error}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if same else 1


def _demonstrate_train() -> bool:
    print(
        f"A tiny GPT on {RANKS} CPU ranks (gloo) with overlap_grad_reduce, overlap_param_gather and the\n"
        f"distributed optimizer: {CALLS} calls of {STEPS} steps of megatron.training.training.train().\n"
    )
    outcomes = _run_all(train_without, train_again, train_once, "no overlap, one call")
    return _compare(*outcomes, "train() was called once and worked; called again:")


def _demonstrate_hooks() -> bool:
    print(
        "This megatron-core comes without megatron.training, so that its train() cannot be shown: that needs\n"
        "megatron-core 0.17 or later, on Python 3.12 or later. What is shown is what this version raises itself:\n"
        f"DistributedDataParallel's forward pre-hooks, on {RANKS} CPU ranks (gloo), switched off and on around\n"
        f"every {STEPS} of {CALLS * STEPS} steps of a tiny GPT.\n"
    )
    outcomes = _run_all(hooks_without, hooks_switched, hooks_never, "no overlap")
    return _compare(*outcomes, "Megatron says:")


def _run_all(without: Job, repaired: Job, plain: Job, plain_title: str) -> tuple[Outcome, Outcome, Outcome]:
    return (
        _run("without megapatch", without, UNPATCHED),
        _run("with megapatch", repaired),
        _run(f"{plain_title}, without megapatch", plain, UNPATCHED),
    )


def _run(title: str, job: Job, env: Mapping[str, str] | None = None) -> Outcome:
    from ..testing import run_ranks

    print(f"  running {title} ...", end="", flush=True)
    started = time.monotonic()
    outcome: Outcome = run_ranks(job, RANKS, env=env)[0]
    print(f" {time.monotonic() - started:.0f} s")
    return outcome


def _compare(without: Outcome, repaired: Outcome, plain: Outcome, heading: str) -> bool:
    print(f"\nwithout megapatch\n  {heading}")
    for what, text in without.errors:
        print(textwrap.fill(f"{what}: {text}", 100, initial_indent="    ", subsequent_indent="      "))
    rows = {"without megapatch": without, "with megapatch": repaired, "no overlap": plain}
    print("\nmean loss of each step" + "".join(f"{f'call {call + 1}':>19}" for call in range(CALLS)))
    for title, outcome in rows.items():
        cells = [" ".join(f"{loss:.5f}" for loss in losses) for losses in outcome.losses]
        if cells:
            cells += ["failed"] * (CALLS - len(cells))
            print(f"  {title:20}" + "".join(f"{cell:>19}" for cell in cells))
    difference = max(
        float((value - plain.parameters[name]).abs().max()) for name, value in repaired.parameters.items()
    )
    same = difference <= TOLERANCE and repaired.parameters.keys() == plain.parameters.keys()
    print(
        f"\nlargest difference of a parameter: {difference:.1e}: {'the same run' if same else 'NOT the same run'}"
    )
    return same


def _cannot(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2
