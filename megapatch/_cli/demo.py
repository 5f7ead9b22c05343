"""megapatch demo: call Megatron again and again, with and without megapatch, on two CPU ranks.

Where the installed megatron-core has no train(), the demo shows the forward pre-hooks instead.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._engine.settings import DISABLE, ONLY
from .._reporting import terminal
from .._verify.world import lacking
from .._version import REPOSITORY, __version__
from .._versions import exact_version, here
from ..patch import Status
from ..patches import PATCHES

RANKS = 2
COLUMNS = 80
EXIT_CODES = """\
exit codes:
  0    the repaired run equals the plain one
  1    it does not, or a run failed
  2    the demo cannot run here (torch or megatron-core is missing)
  130  interrupted (Ctrl-C)
"""
TOLERANCE = 1e-5
"""Two runs are equal when no parameter differs by more: float32 sums may be taken in another order."""

UNPATCHED = {DISABLE: "*", ONLY: ""}
REPAIRED = {DISABLE: "", ONLY: ""}

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


# ------------------------------------------------------------------------------------------------ the comparison
class Story(NamedTuple):
    """Three runs that are compared, and the patches that repair the second one."""

    introduction: str
    heading: str
    without: Job
    repaired: Job
    plain: Job
    plain_title: str
    repaired_by: Sequence[str]


TRAIN = Story(
    introduction=f"A tiny GPT on {RANKS} CPU ranks (gloo) with overlap_grad_reduce, overlap_param_gather and "
    f"the distributed optimizer: {CALLS} calls of {STEPS} steps of megatron.training.training.train().",
    heading="train() was called once and worked; called again:",
    without=train_without,
    repaired=train_again,
    plain=train_once,
    plain_title="no overlap, one call",
    repaired_by=("megatron.train-reentry", "megatron.forward-pre-hook"),
)
HOOKS = Story(
    introduction="This megatron-core comes without megatron.training, so its train() cannot be shown: that needs "
    "megatron-core 0.17 or later, on Python 3.12 or later. Shown instead is what this version raises itself: "
    f"DistributedDataParallel's forward pre-hooks, on {RANKS} CPU ranks (gloo), are switched off and on around "
    f"every {STEPS} of {CALLS * STEPS} steps of a tiny GPT.",
    heading="Megatron says:",
    without=hooks_without,
    repaired=hooks_switched,
    plain=hooks_never,
    plain_title="no overlap",
    repaired_by=("megatron.forward-pre-hook",),
)


def demo() -> int:
    """Run the demo. The exit code is 0 only if the repaired run equals the plain one; see `EXIT_CODES`."""
    if reason := lacking("the demo", f": pip install {requirement('demo')}"):
        return _cannot(reason)
    versions = {"megapatch": exact_version(), **here()}
    from ..testing import RanksFailed, RanksTimedOut, megatron_training_available

    started = time.monotonic()
    _say(", ".join(f"{name} {version}" for name, version in versions.items()))
    story = TRAIN if megatron_training_available() else HOOKS
    try:
        same = _tell(story)
    except (RanksFailed, RanksTimedOut) as error:
        if module := re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", str(error)):
            return _cannot(
                f"importing this megatron-core needs {module[1]}, which is not installed: pip install it"
            )
        terminal.note(f"the run failed:\n{error}")
        return terminal.NOT_WELL
    terminal.write(f"{time.monotonic() - started:.0f} s")
    return terminal.WELL if same else terminal.NOT_WELL


def _tell(story: Story) -> bool:
    """Run the story's jobs and print the comparison; return whether the repaired run equals the plain one."""
    _say(story.introduction)
    for name in (DISABLE, ONLY):
        if value := os.environ.get(name):
            _say(f"{name}={value} is set. The demo ignores it: its runs have all patches, or none.")
    terminal.write()
    _say(f"Three runs of {RANKS} processes: 10 to 60 s, or longer when torch is first read from disk.")
    terminal.write()
    from ..testing._server import server_of_a_program

    with server_of_a_program():
        without = _run("without megapatch", story.without, UNPATCHED)
        repaired = _run("with megapatch", story.repaired, REPAIRED)
        plain = _run(f"{story.plain_title}, without megapatch", story.plain, UNPATCHED)
    _print_errors(story.heading, without)
    _print_patches(story.repaired_by, repaired)
    return _compare(without, repaired, plain)


def _say(text: str, first: str = "", rest: str = "") -> None:
    terminal.fill(text, COLUMNS, first, rest)


def _run(title: str, job: Job, env: Mapping[str, str]) -> Outcome:
    from ..testing import run_ranks

    started = time.monotonic()
    terminal.write(f"  running {title} ...", end="")
    terminal.flush()
    outcome: Outcome
    try:
        (outcome, *_) = run_ranks(job, RANKS, env=env)
    except BaseException:
        terminal.write()
        raise
    terminal.write(f" {time.monotonic() - started:.0f} s")
    return outcome


def _print_errors(heading: str, without: Outcome) -> None:
    terminal.write(f"\nwithout megapatch\n  {heading}")
    for what, text in without.errors:
        _say(f"{what}: {text}", " " * 4, " " * 6)


def _print_patches(repaired_by: Sequence[str], repaired: Outcome) -> None:
    """Name the patches that the repaired run needed, then the others that were applied in it."""
    summaries = {patch.name: patch.summary for patch in PATCHES}
    terminal.write("\nwith megapatch\n  repaired by (`megapatch explain NAME` says how):")
    for name in repaired_by:
        state = "" if name in repaired.patches else "NOT APPLIED: "
        _say(f"{name}: {state}{summaries[name]}", " " * 4, " " * 6)
    if others := [name for name in repaired.patches if name not in repaired_by]:
        _say(f"applied as well, and not needed in this run: {', '.join(others)}", "  ", " " * 4)


def _compare(without: Outcome, repaired: Outcome, plain: Outcome) -> bool:
    """Print the losses, and whether the parameters of the repaired run are those of the plain one."""
    rows = [["mean loss of each step", *(f"call {call + 1}" for call in range(CALLS))]]
    for title, outcome in (("without megapatch", without), ("with megapatch", repaired), ("no overlap", plain)):
        cells = [" ".join(f"{loss:.5f}" for loss in losses) for losses in outcome.losses]
        if cells:
            rows.append([f"  {title}", *cells, *["failed"] * (CALLS - len(cells))])
    terminal.write("\n".join(["", *terminal.table(rows)]))
    difference = max(
        float((value - plain.parameters[name]).abs().max()) for name, value in repaired.parameters.items()
    )
    same = difference <= TOLERANCE and repaired.parameters.keys() == plain.parameters.keys()
    verdict = "the same run" if same else "NOT the same run"
    terminal.write(f"\nlargest difference of a parameter: {difference:.1e}: {verdict}")
    return same


def _cannot(sentence: str) -> int:
    terminal.note(sentence)
    return terminal.COULD_NOT_LOOK


def requirement(extra: str) -> str:
    """Return pip's requirement for an extra of this megapatch, in quotes. megapatch is not on PyPI."""
    commit = re.search(r"\+g([0-9a-f]+)$", __version__)
    return f'"megapatch[{extra}] @ git+{REPOSITORY}{f"@{commit[1]}" if commit else ""}"'
