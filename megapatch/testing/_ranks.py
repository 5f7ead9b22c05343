"""Run a function in several local processes that form one torch.distributed world over gloo.

The processes are forked from a server that has imported torch once for this caller, and what else Megatron needs,
so that a call only pays for Megatron's import. The server imports neither Megatron nor megapatch.
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

# What Megatron imports and takes most of its import time. The server leaves out what is not installed. Not
# torch.utils.cpp_extension, which looks for GPUs: after a fork nobody could use them.
_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.experimental",
    "setuptools.command.build_ext",
    "torch.utils.tensorboard",
    "einops",
    "fsspec",
    "yaml",
]
if not sys.warnoptions:  # the server inherits them, and would die of torch's own DeprecationWarning
    _PRELOADED.append("torch._inductor.compile_fx")
_GRACE = 2.0  # seconds for the other ranks to finish after one has failed


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    setup: Callable[[], object] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(rank, world_size, *args)`` in `world_size` new processes.

    Each process, in this order, sets its environment (the caller's with `env` on top), calls
    `install_cuda_stubs()`, `setup()` and `torch.distributed.init_process_group("gloo")`, and makes the call.
    Megatron is not imported before `setup()`, except by the module that defines `setup`. megapatch is active in
    the processes, with the settings in `env`: ``env={"MEGAPATCH_DISABLE": "*"}`` shows Megatron as it is.

    However the call ends, even if the caller is killed, none of its processes is left, nor any that they started:
    each rank leads its own process group. Only the server stays, until the caller exits.

    Args:
        function: a function at module level.
        world_size: number of ranks.
        *args: more arguments of `function`; they must be picklable (tensors go by value).
        timeout: seconds for everything.
        setup: a function at module level, called without arguments.
        env: environment variables of the processes.

    Returns:
        The results, by rank; they must be picklable.

    Raises:
        RanksFailed: a rank raised or died. The others, which may wait for it forever, got two seconds more.
        RanksTimedOut: the message names the late ranks and shows where they were.
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
    """The caller's side of one rank's process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcome: Outcome | None = None
        self.process: multiprocessing.process.BaseProcess | None = None
        self.channel, self._theirs = multiprocessing.Pipe()

    def start(self, environment: dict[str, str]) -> None:
        namespace = {"environment": environment, "job": asdict(self.job), "channel": self._theirs}
        context = multiprocessing.get_context("forkserver")
        # Not daemonic: saving a checkpoint starts processes, and a daemon must not.
        self.process = context.Process(target=exec, args=(_rank_process.BOOTSTRAP, namespace))
        with _no_main_module():
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

    A rank may not find them by itself: pytest's importlib mode makes up names for test modules.
    """

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
    """Receive outcomes until all ranks are done or the deadline has passed, which a failure brings closer."""
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


def _each(what: str, texts: Mapping[int, str], world_size: int) -> list[str]:
    """Return a line for each of these ranks, with the rank's text below."""
    return [f"rank {rank} of {world_size} {what}:\n{text}" for rank, text in texts.items()]


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


def _ensure_server() -> None:
    """Start multiprocessing's fork server if it is not running yet, with torch imported and a single thread.

    If another library has started it without torch, that works as well, but is slower.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    # Forking a process with threads is unsafe. Inductor of older torches starts some when it is imported.
    # ensure_running() is not documented (seen in CPython 3.6 to 3.13). Without it the first process would start
    # the server, when these variables are no longer set.
    with _environment(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", TORCH_WARM_POOL="0"):
        multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Hide the caller's script from multiprocessing, which would run it in the child before all else.

    The environment is not set by then. The child runs the script later, if needed.
    """
    # multiprocessing.spawn.get_preparation_data() reads sys.modules["__main__"] when a process starts (seen in
    # CPython 3.6 to 3.13): https://github.com/python/cpython/blob/v3.13.0/Lib/multiprocessing/spawn.py#L192
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
