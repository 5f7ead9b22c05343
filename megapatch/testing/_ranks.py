"""Run a function in several local processes that form one torch.distributed world over gloo.

The processes are forked from a server. It has imported torch and Megatron's other needs once for this caller, so a
call only pays for Megatron's import. The server imports neither Megatron nor megapatch.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
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
from typing import Any, Literal

from .._engine.settings import QUIET
from ..errors import MisuseError, RanksFailed, RanksTimedOut
from . import _main_module, _rank_process
from ._rank_process import STACK_SIGNAL, Job, Outcome
from ._server import ensure_server, nothing_of_the_caller

_GRACE = 2.0  # seconds for the other ranks to finish after one has failed
_ASK_EVERY = 0.5  # seconds


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 600.0,
    setup: Callable[[], object] | None = None,
    env: Mapping[str, str] | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    backend: Literal["gloo", "nccl"] | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in `world_size` new processes.

    Each process, in this order, sets its environment (the caller's with `env` on top), calls
    `install_cuda_stubs()`, `setup()` and `torch.distributed.init_process_group("gloo")`, and makes the call.
    Megatron is not imported before `setup()`, except by the module that defines `setup`. megapatch is active in
    the processes, with the settings in `env`: ``env={"MEGAPATCH_DISABLE": "*"}`` shows Megatron as it is.

    However the call ends, even if the caller is killed, none of its processes is left, nor any that they started:
    each rank leads its own process group. Only the server stays, until the caller exits. Until the call ends, the
    store in which ranks meet listens on a port of this machine, as torchrun's does.

    Args:
        function: a function at module level of a module or a script, which ranks import. A script makes its calls
            under ``if __name__ == "__main__":``, as with multiprocessing. ``python -m`` works, too; a notebook
            imports the function from a file.
        world_size: number of ranks.
        *args: more arguments of `function`; they must be picklable (tensors go by value).
        timeout: seconds for everything.
        setup: a function at module level, called without arguments.
        env: environment variables of the processes.
        device: "cpu", or "cuda" for the visible GPUs over NCCL. Ranks take them in turn; those that share one talk
            through sockets, as if they were on several machines. On GPUs nothing of torch.cuda is replaced, and
            processes are started afresh: a process that was forked may not use CUDA.
        backend: of torch.distributed; None: gloo on CPU, NCCL on GPUs.

    Returns:
        The results, by rank; they must be picklable. Tensors come back on the CPU.

    Raises:
        MisuseError: a function or argument cannot be sent: it has no file, is local, or cannot be pickled.
        RanksFailed: a rank raised or died. The others, which may wait for it forever, got two seconds more.
        RanksTimedOut: the message names the late ranks and shows where they were.
    """
    work = pickled(function, args, setup)
    from torch.distributed import TCPStore

    # Ranks that meet in a file look for each other every 10 ms only, once more for each process group.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = f"tcp://127.0.0.1:{store.port}/ranks"
    with tempfile.TemporaryDirectory(prefix="megapatch-ranks-") as directory:
        jobs = [
            Job(rank, world_size, meeting, f"{directory}/stack-{rank}", *work, device=device, backend=backend)
            for rank in range(world_size)
        ]
        with jobs_done(jobs, {**os.environ, **(env or {})}, timeout) as done:
            return results(*done, timeout)


def pickled(
    function: Callable[..., Any], args: tuple[Any, ...], setup: Callable[[], object] | None = None
) -> tuple[bytes, bytes, dict[str, str], tuple[str, str] | None]:
    """Return the fields `setup`, `call`, `files` and `main` of the jobs that make this call."""
    _main_module.refuse_while_importing()
    files: dict[str, str] = {}
    work = _dumps(setup, files), _dumps((function, args), files)
    needed = files.pop("__main__", None)
    return *work, files, _main_module.find_main(needed) if needed else None


@contextlib.contextmanager
def jobs_done(
    jobs: list[Job],
    environment: dict[str, str],
    timeout: float,
    failed_elsewhere: Callable[[], bool] | None = None,
) -> Iterator[tuple[dict[int, Outcome | None], dict[int, str]]]:
    """Do the jobs of this machine's ranks, each in a new process. The processes end with the context.

    Args:
        jobs: one for each rank; other ranks of the same world may be the business of other callers.
        environment: of the processes.
        timeout: seconds for everything.
        failed_elsewhere: asked now and then whether a rank of another caller has failed.

    Yields:
        By rank, the outcome, or None for a rank that did not finish; and the stacks of those ranks as texts.
    """
    ranks = [_Rank(job) for job in jobs]
    try:
        if jobs[0].device == "cpu":
            ensure_server()
        for rank in ranks:
            rank.start({QUIET: "1", **environment})
        _listen(ranks, time.monotonic() + timeout, failed_elsewhere)
        waiting = _stacks([rank for rank in ranks if rank.outcome is None])
        yield {rank.job.rank: rank.outcome for rank in ranks}, waiting
    finally:
        for rank in ranks:
            rank.end()


def results(outcomes: Mapping[int, Outcome | None], waiting: Mapping[int, str], timeout: float) -> list[Any]:
    """Return the results of all ranks of a world, or raise RanksFailed or RanksTimedOut."""
    world_size = len(outcomes)
    done = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None}
    failed = sorted((outcome.failed_at, rank) for rank, outcome in done.items() if outcome.failure)
    if failed:
        failures = {rank: done[rank].failure for _, rank in failed}
        lines = [
            *_each("failed", failures, world_size),
            *_each("was still waiting when it was ended", waiting, world_size),
        ]
        raise RanksFailed("\n".join(lines), failures, waiting)
    if waiting:
        raise RanksTimedOut("\n".join(_each(f"did not finish within {timeout:g} s", waiting, world_size)))
    return [_load(outcome.result) for _, outcome in sorted(done.items())]


def _load(result: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(result), "cpu", weights_only=False)  # our own process wrote it


class _Rank:
    """The caller's side of one rank's process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcome: Outcome | None = None
        self.process: multiprocessing.process.BaseProcess | None = None
        self.channel, self._theirs = multiprocessing.Pipe()

    def start(self, environment: dict[str, str]) -> None:
        namespace = {"environment": environment, "job": asdict(self.job), "channel": self._theirs}
        # A forked process may not use CUDA.
        context: Any = multiprocessing.get_context("forkserver" if self.job.device == "cpu" else "spawn")
        # Not daemonic: saving a checkpoint starts processes, and a daemon must not.
        self.process = context.Process(target=exec, args=(_rank_process.BOOTSTRAP, namespace))
        with nothing_of_the_caller():
            self.process.start()
        self._theirs.close()

    def receive(self) -> None:
        """Take the outcome, once there is one or the process has ended."""
        try:
            if not self.channel.poll():
                raise EOFError
            self.outcome = self.channel.recv()
        except (EOFError, OSError):
            assert self.process is not None
            self.process.join(1.0)
            ending = f"its process ended without a result ({_ending(self.process.exitcode)})"
            if stack := _text(Path(self.job.stack)):
                ending = f"{ending}\n{stack}"
            self.outcome = Outcome(failure=ending, failed_at=time.monotonic())

    def end(self) -> None:
        self.channel.close()
        self._theirs.close()
        process = self.process
        if process is None or process.pid is None:
            return  # interrupted during the start: the process sees the closed channel and ends itself
        process.kill()
        process.join()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it started
        process.close()


def _dumps(value: Any, files: dict[str, str]) -> bytes:
    """Pickle the value, and add to `files` the modules of its functions and classes.

    A rank may not find them by itself: pytest's importlib mode makes up names for test modules. If `__main__` is
    among them, its entry is the name of the needed object.
    """

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, types.FunctionType)):
                file = getattr(sys.modules.get(obj.__module__), "__file__", None)
                if obj.__module__ in _main_module.NAMES:
                    files["__main__"] = obj.__qualname__
                elif file and obj.__module__.partition(".")[0] != "megapatch":
                    files[obj.__module__] = file
            return NotImplemented

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise MisuseError(
            "run_ranks() sends its functions and arguments to other processes, and found that pickle cannot: "
            f"{error}. Expected functions at module level, not lambdas or functions in functions, and "
            "arguments that can be pickled"
        ) from error
    return buffer.getvalue()


def _listen(ranks: list[_Rank], deadline: float, failed_elsewhere: Callable[[], bool] | None = None) -> None:
    """Receive outcomes until all ranks are done or the deadline has passed, which a failure brings closer."""
    while pending := [rank for rank in ranks if rank.outcome is None]:
        if failed_elsewhere is not None and failed_elsewhere():
            deadline, failed_elsewhere = min(deadline, time.monotonic() + _GRACE), None
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        if failed_elsewhere is not None:
            remaining = min(remaining, _ASK_EVERY)
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
    """Return the stacks of these ranks, which each process writes itself."""
    for rank in ranks:
        assert rank.process is not None and rank.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, STACK_SIGNAL)
    if ranks:
        time.sleep(0.3)
    return {rank.job.rank: _text(Path(rank.job.stack)) for rank in ranks}


def _text(path: Path) -> str:
    return path.read_text().rstrip() if path.exists() else "(it had not started)"


def _each(fate: str, texts: Mapping[int, str], world_size: int) -> list[str]:
    """Return a line for each of these ranks, with the rank's text below."""
    return [f"rank {rank} of {world_size} {fate}:\n{text}" for rank, text in texts.items()]


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"
