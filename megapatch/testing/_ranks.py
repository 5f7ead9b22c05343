"""Run a function in several local processes that form one torch.distributed world over gloo.

The processes are forked from a server that has imported torch, once per caller; what is left to pay for a call
is Megatron's import. Nothing of Megatron or megapatch is in that server.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..errors import RanksFailed, RanksTimedOut
from . import _rank_process
from ._rank_process import STACK_SIGNAL, Job, Outcome

# torch, and what every Megatron imports of it, which is most of its own import.
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor.experimental"]
if not sys.warnoptions:  # the fork server has them, too, and would die of torch's own DeprecationWarning
    _PRELOADED.append("torch._inductor.compile_fx")
_GRACE = 2.0  # seconds that the others get to finish after one rank has failed


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    setup: Callable[[], object] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in `world_size` new processes; the results, by rank.

    In each process, in this order: the environment is the caller's with `env` on top, `install_cuda_stubs()`,
    `setup()`, `torch.distributed.init_process_group("gloo")`, the call. Nothing of megatron is imported before
    `setup()` except by the module that `setup` is from. megapatch is active in the processes, as `env` says:
    ``env={"MEGAPATCH_DISABLE": "*"}`` shows Megatron as it is.

    function, setup   of module level; args and results must be picklable (tensors go by value)
    timeout           seconds for everything

    Raises RanksFailed when a rank raises or dies; the others, that may wait for it for ever, get two seconds
    more. Raises RanksTimedOut, naming the late ranks and where they are. However the call ends (the caller may
    even be killed), none of its processes is left, nor any that they started: each rank leads its own process
    group. Only the server stays, until the caller exits.
    """
    files: dict[str, str] = {}
    first, then = _dumps(setup, files), _dumps((function, args), files)
    environment = {**os.environ, **(env or {})}
    with tempfile.TemporaryDirectory(prefix="megapatch-ranks-") as directory:
        ranks = [
            _Rank(Job(rank, world_size, f"{directory}/store", f"{directory}/stack-{rank}", first, then, files))
            for rank in range(world_size)
        ]
        try:
            _ensure_server()
            for rank in ranks:
                rank.start(environment)
            _listen(ranks, time.monotonic() + timeout)
            waiting = _stacks([rank for rank in ranks if rank.outcome is None])
        finally:
            for rank in ranks:
                rank.end()
    outcomes = [(rank.job.rank, rank.outcome) for rank in ranks if rank.outcome is not None]
    failed = sorted((outcome.failed_at, rank) for rank, outcome in outcomes if outcome.failure)
    if failed:
        failures = {rank: dict(outcomes)[rank].failure for _, rank in failed}
        lines = [
            *_each("failed", failures, world_size),
            *_each("was still waiting when it was ended", waiting, world_size),
        ]
        raise RanksFailed("\n".join(lines), failures, waiting)
    if waiting:
        raise RanksTimedOut("\n".join(_each(f"did not finish within {timeout:g} s", waiting, world_size)))
    return [_load(outcome.result) for _, outcome in outcomes]


def _load(result: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(result), weights_only=False)  # our own process wrote it


class _Rank:
    """One rank's process, seen from the caller."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcome: Outcome | None = None
        self.process: multiprocessing.process.BaseProcess | None = None
        self.channel, self._theirs = multiprocessing.Pipe()

    def start(self, environment: dict[str, str]) -> None:
        namespace = {"environment": environment, "job": asdict(self.job), "channel": self._theirs}
        context = multiprocessing.get_context("forkserver")
        # Not daemonic: saving a checkpoint starts processes, which daemons may not.
        self.process = context.Process(target=exec, args=(_rank_process.BOOTSTRAP, namespace))
        with _no_main_module():
            self.process.start()
        self._theirs.close()

    def receive(self) -> None:
        """Take the outcome; call it when there is one or the process has ended."""
        try:
            if not self.channel.poll():
                raise EOFError
            self.outcome = self.channel.recv()
        except (EOFError, OSError):
            assert self.process is not None
            self.process.join(1.0)
            ending = f"its process ended without a result ({_ending(self.process.exitcode)})"
            self.outcome = Outcome(failure=ending, failed_at=time.monotonic())

    def end(self) -> None:
        self.channel.close()
        self._theirs.close()
        process = self.process
        if process is None or process.pid is None:
            return  # interrupted while starting: it sees the closed channel and ends itself
        process.kill()
        process.join()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it started
        process.close()


def _dumps(value: Any, files: dict[str, str]) -> bytes:
    """Pickle it, and add where the modules of its functions and classes come from: a rank may not find them, as
    pytest's importlib mode gives test modules names of its own."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, types.FunctionType)):
                file = getattr(sys.modules.get(obj.__module__), "__file__", None)
                if file and obj.__module__.partition(".")[0] != "megapatch":
                    files[obj.__module__] = file
            return NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _listen(ranks: list[_Rank], deadline: float) -> None:
    """Receive outcomes until all ranks are done or the time is over, which a failure brings nearer."""
    while pending := [rank for rank in ranks if rank.outcome is None]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        sources: dict[Connection | int, _Rank] = {}
        for rank in pending:
            assert rank.process is not None
            sources[rank.channel] = rank
            sources[rank.process.sentinel] = rank  # a process that it forked may keep its channel open
        for source in wait(list(sources), remaining):
            rank = sources[source]  # type: ignore[index]
            if rank.outcome is None:
                rank.receive()
            if rank.outcome is not None and rank.outcome.failure:
                deadline = min(deadline, time.monotonic() + _GRACE)


def _stacks(ranks: list[_Rank]) -> dict[int, str]:
    """Where these ranks are now, as each process tells it by itself."""
    for rank in ranks:
        assert rank.process is not None and rank.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, STACK_SIGNAL)
    if ranks:
        time.sleep(0.3)
    return {rank.job.rank: _text(Path(rank.job.stack)) for rank in ranks}


def _text(path: Path) -> str:
    return path.read_text().rstrip() if path.exists() else "(it had not begun)"


def _each(what: str, texts: Mapping[int, str], world_size: int) -> list[str]:
    """A line with the text below it for each of these ranks."""
    return [f"rank {rank} of {world_size} {what}:\n{text}" for rank, text in texts.items()]


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


def _ensure_server() -> None:
    """Start multiprocessing's fork server if it does not run yet, with torch imported and a single thread.

    Someone else may have started it, without torch: that is slower and works as well.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    # A process with threads forks badly. Inductor of older torches starts some when it is imported.
    with _environment(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", TORCH_WARM_POOL="0"):
        multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """multiprocessing would run the caller's script in the child first of all, before its environment is set.
    The child does it later, if it needs it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
