"""megapatch verify: run all checks here, show progress, and print the results."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from .._engine.complaints import unknown_name
from .._engine.settings import matching
from .._reporting import terminal
from .._versions import here
from ..errors import MegapatchError, RanksFailed, RanksTimedOut
from ..patches._catalogue import CATALOGUE
from . import in_ranks
from .check import CannotRunHere
from .results import UNDECIDED, UNFINISHED, WITH, Results, Row, run_check, without_a_run
from .world import Device, Launched, Local, World, gpus, is_launched, lacking, opened

SECONDS = 600.0
AT_LEAST = 2
"""Ranks, unless fewer are asked for: most defects need two."""
EXIT_CODES = """\
exit codes:
  0    all is repaired, or was switched off on purpose
  1    something is not, or could not be decided in time
  2    nothing can be verified here: bad usage, or torch or megatron-core is
       missing or cannot be imported
  130  interrupted (Ctrl-C); what was known until then is printed
"""


class CannotRun(Exception):
    """Nothing can be verified here; the message says why, and what to do."""


def verify(
    names: Sequence[str] = (),
    as_json: bool = False,
    seconds: float = SECONDS,
    processes: int | None = None,
    device: Device | None = None,
) -> int:
    """Run the checks, print their results, and return one of `EXIT_CODES`.

    Args:
        names: of patches and checks, or globs; none for all.
        as_json: print JSON instead of text.
        seconds: for each run of a check, of which it has two.
        processes: number of ranks; None for one a GPU, and 2 on CPU and where
            there is only one GPU. Under torchrun it is torchrun's.
        device: None for GPUs where there are any.
    """
    output = terminal.reserve()
    try:
        chosen = _chosen(names)
        world = _world(processes, device)
    except CannotRun as error:
        terminal.note(str(error))
        return terminal.COULD_NOT_LOOK
    results = Results(here(), world.device, "gloo" if world.device == "cpu" else "nccl", world.size)
    with _sigterm_interrupts():
        try:
            with opened(world):
                _fill(results, world, chosen, seconds)
        except KeyboardInterrupt:
            results.stopped = "interrupted"
        except CannotRun as error:
            if world.leads:
                terminal.note(str(error))
            world.close()
            return terminal.COULD_NOT_LOOK
        except MegapatchError as error:
            results.stopped = str(error)
    if world.leads:
        if as_json:
            terminal.write_json(results.to_dict(), file=output)
        else:
            terminal.write(results.text(terminal.width()), file=output)
        terminal.flush(output)
    world.close()
    return terminal.INTERRUPTED if results.stopped == "interrupted" else results.exit_code


def _world(processes: int | None, device: Device | None) -> World:
    if reason := lacking("verify", ", not installed here: run it with the Python that trains"):
        raise CannotRun(reason)
    there = gpus()
    if device == "cuda" and not there:
        raise CannotRun("--device cuda: torch sees no GPU here")
    device = device or ("cuda" if there else "cpu")
    if is_launched():
        if processes is not None:
            raise CannotRun("--processes: the number of processes is that of the launcher (RANK is set)")
        try:
            return Launched(device)
        except (RuntimeError, ValueError) as error:
            raise CannotRun(f"the launcher's store (MASTER_ADDR, MASTER_PORT) does not answer: {error}") from error
    return Local(processes or max(AT_LEAST, there if device == "cuda" else 0), device)


def _chosen(names: Sequence[str]) -> list[str]:
    """Return the names of checks and of patches without one, in the order in which they run."""
    from .checks import CHECKS

    patches = [name for family in CATALOGUE.values() for name in family]
    known = list(dict.fromkeys([*(check.name for check in CHECKS), *patches]))
    for name in names:
        if not matching(name, known):
            raise CannotRun(unknown_name(name, known))
    wanted = {found for name in names for found in matching(name, known)}
    return [name for name in known if not names or name in wanted]


def _fill(results: Results, world: World, chosen: Sequence[str], seconds: float) -> None:
    """Run the checks that are left, one after the other."""
    from .checks import CHECKS

    checks = {check.name: check for check in CHECKS}
    patches = {name for family in CATALOGUE.values() for name in family}
    try:
        found = _examine_ranks(world, [name for name in chosen if name in patches], seconds)
    except (RanksFailed, RanksTimedOut) as error:
        if isinstance(error, RanksFailed) and (why := in_ranks.last_line(error, CannotRunHere.__name__)):
            raise CannotRun(f"verify cannot run here: {why}") from error
        results.stopped = f"the processes do not work here:\n{error}"
        return
    results.device, statuses, todo = found.device, found.statuses, []
    for name in chosen:
        known = without_a_run(name, statuses[name], name in checks) if name in statuses else None
        if known is None:
            todo.append(name)
        else:
            results.rows.append(known)
    for number, name in enumerate(todo, 1):
        say = _progress(world, f"[{number:{len(str(len(todo)))}}/{len(todo)}] {name}")
        row = Row(name, UNDECIDED, text=UNFINISHED)
        results.rows.append(row)
        run_check(checks[name], row, world, statuses.get(name), seconds, say)
    order = {name: place for place, name in enumerate(chosen)}
    results.rows.sort(key=lambda row: order[row.name])


def _examine_ranks(world: World, names: list[str], seconds: float) -> in_ranks.Look:
    """Return the findings of rank 0: devices, versions, and each patch's status. All ranks have to agree."""
    _progress(world, "what is installed, and what it needs")("looking")
    ranks: list[in_ranks.Look] = world.run(in_ranks.look, tuple(names), env=WITH, timeout=seconds)
    for name in names:
        differing = {rank.statuses[name] for rank in ranks}
        if len(differing) > 1:
            raise MegapatchError(f"{name} is not the same in all ranks: {'; '.join(map(str, differing))}")
    return ranks[0]


def _progress(world: World, what: str) -> Callable[[str], None]:
    started = time.monotonic()

    def say(words: str) -> None:
        if world.leads:
            terminal.note(f"{what}: {words} ({time.monotonic() - started:.0f} s)")

    return say


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """End at SIGTERM as at Ctrl-C, with the results so far: torchrun ends its processes by it."""

    def interrupt(*ignored: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
