"""megapatch demo: call Megatron again and again, with and without megapatch, on two CPU ranks.

Where the installed megatron-core has no train(), the demo shows the forward pre-hooks instead.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .._engine.settings import DISABLE, ONLY
from .._reporting import terminal
from .._version import exact_version, requirement
from .._versions import TESTED, find_module, here, too_old
from ..patches import PATCHES
from .demo_runs import (
    CALLS,
    STEPS,
    Job,
    Outcome,
    hooks_never,
    hooks_switched,
    hooks_without,
    train_again,
    train_once,
    train_without,
)

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
    modules = {"torch": "torch", "megatron-core": "megatron.core"}
    if lacking := [name for name, module in modules.items() if find_module(module) is None]:
        return _cannot(f"the demo needs {' and '.join(lacking)}: pip install {requirement('demo')}")
    versions = {"megapatch": exact_version(), **here()}
    if too_old("megatron-core", version := versions["megatron-core"]):
        return _cannot(f"the demo needs megatron-core {TESTED['megatron-core'][0]} or later; this is {version}")
    from ..testing import RanksFailed, RanksTimedOut, megatron_training_available

    started = time.monotonic()
    _paragraph(", ".join(f"{name} {version}" for name, version in versions.items()))
    story = TRAIN if megatron_training_available() else HOOKS
    try:
        same = _tell(story)
    except (RanksFailed, RanksTimedOut) as error:
        if module := re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", str(error)):
            return _cannot(
                f"importing this megatron-core needs {module[1]}, which is not installed: pip install it"
            )
        terminal.note(f"the run failed:\n{error}")
        return 1
    terminal.write(f"{time.monotonic() - started:.0f} s")
    return 0 if same else 1


def _tell(story: Story) -> bool:
    """Run the story's jobs and print the comparison; return whether the repaired run equals the plain one."""
    _paragraph(story.introduction)
    for name in (DISABLE, ONLY):
        if value := os.environ.get(name):
            _paragraph(f"{name}={value} is set. The demo ignores it: its runs have all patches, or none.")
    terminal.write()
    _paragraph(f"Three runs of {RANKS} processes: 10 to 60 s, or longer when torch is first read from disk.")
    terminal.write()
    from ..testing._server import server_of_a_program

    with server_of_a_program():
        without = _run("without megapatch", story.without, UNPATCHED)
        repaired = _run("with megapatch", story.repaired, REPAIRED)
        plain = _run(f"{story.plain_title}, without megapatch", story.plain, UNPATCHED)
    _print_errors(story.heading, without)
    _print_patches(story.repaired_by, repaired)
    return _compare(without, repaired, plain)


def _run(title: str, job: Job, env: Mapping[str, str]) -> Outcome:
    from ..testing import run_ranks

    with heartbeat(f"  running {title} ..."):
        outcome: Outcome = run_ranks(job, RANKS, env=env)[0]
    return outcome


def _print_errors(heading: str, without: Outcome) -> None:
    terminal.write(f"\nwithout megapatch\n  {heading}")
    for what, text in without.errors:
        terminal.write("\n".join(terminal.wrapped(f"{what}: {text}", COLUMNS, " " * 4, " " * 6)))


def _print_patches(repaired_by: Sequence[str], repaired: Outcome) -> None:
    """Name the patches that the repaired run needed, then the others that were applied in it."""
    summaries = {patch.name: patch.summary for patch in PATCHES}
    terminal.write("\nwith megapatch\n  repaired by (`megapatch explain NAME` says how):")
    for name in repaired_by:
        state = "" if name in repaired.patches else "NOT APPLIED: "
        lines = terminal.wrapped(f"{name}: {state}{summaries[name]}", COLUMNS, " " * 4, " " * 6)
        terminal.write("\n".join(lines))
    if others := [name for name in repaired.patches if name not in repaired_by]:
        text = f"applied as well, and not needed in this run: {', '.join(others)}"
        terminal.write("\n".join(terminal.wrapped(text, COLUMNS, "  ", " " * 4)))


def _compare(without: Outcome, repaired: Outcome, plain: Outcome) -> bool:
    """Print the losses, and whether the parameters of the repaired run are those of the plain one."""
    rows = {"without megapatch": without, "with megapatch": repaired, "no overlap": plain}
    terminal.write("\nmean loss of each step" + "".join(f"{f'call {call + 1}':>19}" for call in range(CALLS)))
    for title, outcome in rows.items():
        cells = [" ".join(f"{loss:.5f}" for loss in losses) for losses in outcome.losses]
        if cells:
            cells += ["failed"] * (CALLS - len(cells))
            terminal.write(f"  {title:20}" + "".join(f"{cell:>19}" for cell in cells))
    difference = max(
        float((value - plain.parameters[name]).abs().max()) for name, value in repaired.parameters.items()
    )
    same = difference <= TOLERANCE and repaired.parameters.keys() == plain.parameters.keys()
    verdict = "the same run" if same else "NOT the same run"
    terminal.write(f"\nlargest difference of a parameter: {difference:.1e}: {verdict}")
    return same


def _paragraph(text: str) -> None:
    terminal.write("\n".join(terminal.wrapped(text, COLUMNS, rest="")))


def _cannot(sentence: str) -> int:
    terminal.note(sentence)
    return 2


DOT_EVERY = 5.0
"""Seconds between two dots where the output is not a terminal."""


@contextlib.contextmanager
def heartbeat(text: str) -> Iterator[None]:
    """Print the text, keep it alive while the block runs, and end the line with the seconds that it took.

    On a terminal the seconds count up; elsewhere a dot is added every `DOT_EVERY` seconds. If the
    block raises, the line ends there.
    """
    started = time.monotonic()
    done = threading.Event()
    on_terminal = sys.stdout is not None and sys.stdout.isatty()

    def beat() -> None:
        with contextlib.suppress(terminal.OutputLost):  # the main thread's next line finds out
            while not done.wait(1.0 if on_terminal else DOT_EVERY):
                seconds = f"{time.monotonic() - started:.0f} s"
                terminal.write(f"{text} {seconds}" if on_terminal else ".", end="", over=on_terminal)
                terminal.flush()

    terminal.write(text, end="")
    terminal.flush()
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    ending = ""
    try:
        yield
        ending = f" {time.monotonic() - started:.0f} s"
    finally:
        done.set()
        thread.join()
        again = on_terminal and bool(ending)
        terminal.write(f"{text}{ending}" if again else ending, over=again)
