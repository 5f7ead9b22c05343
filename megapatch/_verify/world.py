"""The processes that run checks: new ones of this machine, or one beside each process of a launcher."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol

from .._python.finding import find_module
from .._versions import TESTED, here, too_old
from ..errors import MegapatchError

Device = Literal["cpu", "cuda"]

SLACK = 60.0
"""Seconds that other machines may be late with an answer."""


class World(Protocol):
    """A number of ranks, each of which gets a new process for each run."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def device(self) -> Device:
        """The hardware and the layout that the ranks train on."""

    @property
    def leads(self) -> bool:
        """Whether this process is the one that prints."""

    def run(self, function: Callable[..., Any], *args: Any, env: Mapping[str, str], timeout: float) -> list[Any]:
        """Call `function` in a new process a rank, as `run_ranks`; the same result or error in each launcher."""

    def close(self) -> None:
        """Let the others finish: they may still have to read the last run's outcome."""


class Local(NamedTuple):
    """Ranks on this machine."""

    size: int
    device: Device
    leads: bool = True

    def run(self, function: Callable[..., Any], *args: Any, env: Mapping[str, str], timeout: float) -> list[Any]:
        from ..testing import run_ranks
        from ..testing._imported import forked_with

        on_cpu = self.device == "cpu"
        with forked_with({**os.environ, **env}) if on_cpu else contextlib.nullcontext():
            return run_ranks(function, self.size, *args, env=env, timeout=timeout, device=self.device)

    def close(self) -> None:
        pass


class NoAnswer(MegapatchError):
    """A launcher on another machine, or in another process, no longer answers."""


class Launched:
    """One rank of a world whose ranks torchrun, or another launcher, has started: each starts its own process.

    The launched processes themselves train nothing and hold no GPU. They meet at MASTER_ADDR and MASTER_PORT; the
    processes that they start meet in the same store, under a name of their own for each run.
    """

    def __init__(self, device: Device, environment: Mapping[str, str] = os.environ) -> None:
        from torch.distributed import TCPStore

        self.rank, self.size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self.local_rank = int(environment.get("LOCAL_RANK", "0"))
        self.device: Device = device
        self.leads = self.rank == 0
        self._host, self._port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        torchruns = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if not self._port:
            raise ValueError("MASTER_PORT is 0")
        self._store = TCPStore(
            self._host,
            self._port,
            is_master=self.leads and not torchruns,
            wait_for_workers=False,
            timeout=timedelta(seconds=SLACK),
        )
        self._runs = itertools.count()
        # A job that is started again meets in the same store.
        self._job = f"megapatch-verify/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def run(self, function: Callable[..., Any], *args: Any, env: Mapping[str, str], timeout: float) -> list[Any]:
        from ..testing._rank_process import Job
        from ..testing._ranks import jobs_done, pickled, results

        run = f"{self._job}/{next(self._runs)}"
        with tempfile.TemporaryDirectory(prefix="megapatch-ranks-") as folder:
            job = Job(
                self.rank,
                self.size,
                f"tcp://{self._host}:{self._port}/{run}/ranks",
                f"{folder}/stack",
                *pickled(function, args),
                device=self.device,
                local_rank=self.local_rank,
            )
            with jobs_done(
                [job], {**os.environ, **env}, timeout, lambda: bool(self._store.check([f"{run}/failed"]))
            ) as (outcomes, waiting):
                mine = outcomes[self.rank]
                if mine is not None and mine.failure:
                    self._store.set(f"{run}/failed", b"1")
                self._store.set(f"{run}/{self.rank}", pickle.dumps((mine, waiting.get(self.rank))))
                return results(*self._gathered(run, timeout), timeout)

    def close(self) -> None:
        done = [f"{self._job}/done/{rank}" for rank in range(self.size)]
        self._store.set(done[self.rank], b"1")
        if self.leads:
            with contextlib.suppress(RuntimeError):  # some have ended otherwise
                self._store.wait(done, timedelta(seconds=SLACK))

    def _gathered(self, run: str, timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Return all ranks' outcomes and stacks. Rank 0 collects them, so that each is sent twice at most."""
        if self.leads:
            found = {rank: self._answer(f"{run}/{rank}", rank, timeout + SLACK) for rank in range(self.size)}
            self._store.set(f"{run}/all", pickle.dumps(found))
        else:
            found = self._answer(f"{run}/all", 0, timeout + 2 * SLACK)
        waiting = {rank: stack for rank, (_, stack) in found.items() if stack is not None}
        return {rank: outcome for rank, (outcome, _) in found.items()}, waiting

    def _answer(self, key: str, rank: int, seconds: float) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError as error:  # torch's DistStoreError
            raise NoAnswer(f"rank {rank} of {self.size} does not answer any more") from error
        return pickle.loads(self._store.get(key))


def lacking(what: str, remedy: str) -> str | None:
    """Return in a sentence why Megatron cannot be run here: it, or torch, is missing or too old. None if it can.

    Args:
        what: needs Megatron.
        remedy: ends the sentence where something is missing.
    """
    modules = {"torch": "torch", "megatron-core": "megatron.core"}
    if missing := [name for name, module in modules.items() if find_module(module) is None]:
        return f"{what} needs {' and '.join(missing)}{remedy}"
    version = here()["megatron-core"]
    if too_old("megatron-core", version):
        return f"{what} needs megatron-core {TESTED['megatron-core'][0]} or later; this is {version}"
    return None


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher such as torchrun has started this process as one of several ranks."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys()


def gpus() -> int:
    """Return the number of visible GPUs, without using one."""
    import torch

    return int(torch.cuda.device_count())


@contextlib.contextmanager
def opened(world: World) -> Iterator[None]:
    """Hold the resources that a world's processes are started with."""
    if world.device == "cuda":
        yield
        return
    from ..testing._imported import close_servers
    from ..testing._server import server_of_a_program

    with server_of_a_program():
        try:
            yield
        finally:
            close_servers()
