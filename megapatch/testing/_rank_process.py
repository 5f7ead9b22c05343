"""The child's side of `run_ranks`: the process of one rank."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from typing import IO, Any
from urllib.parse import urlsplit

from ..errors import MisuseError
from ._gloo import use_one_gloo_thread
from ._main_module import importing, load_main, load_pickle, spec_of_file

STACK_SIGNAL = signal.SIGUSR1
GPU_MEMORY = 1 << 30  # bytes that torch may allocate on a GPU; the driver and NCCL take about as much again

# A rank process executes this first. It is sent as source text, because the environment has to be in place before
# megapatch is imported (which activates it), and unpickling a function of megapatch would import it.
BOOTSTRAP = """
import os
os.setpgid(0, 0)
os.environ.clear()
os.environ.update(environment)
from megapatch.testing._rank_process import run
run(channel, **job)
"""


@dataclass(frozen=True)
class Job:
    """The work of one rank. The pickles are opened as late as possible, because that imports modules."""

    rank: int
    world_size: int
    store: str  # where ranks meet: tcp://HOST:PORT/PREFIX, where a store is waiting
    stack: str  # file for this rank's stack, written on STACK_SIGNAL and when native code ends the process
    setup: bytes  # pickled function or None
    call: bytes  # pickled (function, args)
    files: dict[str, str]  # files of the modules that the pickled functions are from, by module name
    main: tuple[str, str] | None  # how to load the caller's __main__, if they are from there
    device: str = "cpu"  # or "cuda"
    backend: str | None = None  # gloo on CPU and NCCL on GPUs
    local_rank: int | None = None  # if not all ranks are on this machine


@dataclass(frozen=True)
class Outcome:
    """A rank's reply: its result as torch.save writes it, or its traceback's text and the time of the failure."""

    result: bytes = b""
    failure: str = ""
    failed_at: float = 0.0  # time.monotonic(), which all processes of a machine share


def run(channel: Connection, **job_fields: Any) -> None:
    """Do the job, and send the outcome.

    After a failure exit, without the interpreter's cleanup, which waits for peers. Otherwise stay until the caller
    ends this process: peers may still be in their last collective, and NCCL aborts them when this one is gone.
    """
    gc.freeze()  # the server's imports: collections would go through all of torch, 0.2 s while Megatron loads
    job = Job(**job_fields)
    threading.Thread(target=_end_with_caller, args=(channel,), daemon=True).start()
    stack = open(job.stack, "w")  # noqa: SIM115  (stays open as long as the process)
    faulthandler.enable(stack)
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)
    try:
        outcome = Outcome(_result(job))
    except BaseException:  # torch's CheckpointException is not an Exception
        outcome = Outcome(failure=traceback.format_exc(), failed_at=time.monotonic())
    channel.send(outcome)
    _flush(sys.stdout, sys.stderr)
    if outcome.failure:
        os._exit(1)
    threading.Event().wait()


def _result(job: Job) -> bytes:
    set_warnings()
    local_rank = job.rank if job.local_rank is None else job.local_rank
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(job.world_size))
    if job.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there is a GPU, it stays out of this
    if sys.platform == "linux" and job.local_rank is None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # needs no resolvable host name
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

    import torch
    import torch.distributed

    torch.set_num_threads(1)
    if job.device == "cpu":
        from ._cuda_stubs import install_cuda_stubs

        install_cuda_stubs()
    else:
        _use_gpu(local_rank)
    sys.meta_path.append(_ByFile(job.files))
    if job.main is not None:
        with importing():
            load_main(*job.main)
    setup = load_pickle(job.setup)
    if setup is not None:
        setup()
    backend = job.backend or ("gloo" if job.device == "cpu" else "nccl")
    use_one_gloo_thread()  # with any backend: Megatron makes gloo groups next to NCCL's
    torch.distributed.init_process_group(
        backend, rank=job.rank, world_size=job.world_size, store=_meeting(job.store)
    )
    function, args = load_pickle(job.call)
    # Tensors go by value: multiprocessing's pickle would share memory with a process that ends, and plain pickle
    # names the function that loads a tensor, which megatron.training replaces with one of its own.
    result = io.BytesIO()
    torch.save(function(job.rank, job.world_size, *args), result)
    return result.getvalue()


def _use_gpu(local_rank: int) -> None:
    """Take one of the visible GPUs, and at most `GPU_MEMORY` of it."""
    import torch

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists for tensor parallelism
    os.environ.setdefault("NO_VCS_VERSION", "1")  # megatron.core would run git when it is imported
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling its fused functions takes longer than most runs
    if not (there := torch.cuda.device_count()):
        raise MisuseError('device="cuda": torch sees no GPU here; expected one for each rank, or device="cpu"')
    turn, device = divmod(local_rank, there)
    if turn:
        # NCCL refuses a GPU that it sees twice on a host; it takes these ranks for those of another one.
        os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}, {turn + 1} ranks on a GPU")
    torch.cuda.set_device(device)
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, GPU_MEMORY / whole))


def _meeting(store: str) -> Any:
    """Return the store in which ranks meet."""
    import torch.distributed

    where = urlsplit(store)
    assert where.hostname is not None and where.port is not None
    there = torch.distributed.TCPStore(where.hostname, where.port, is_master=False)
    return torch.distributed.PrefixStore(where.path, there)


class _ByFile(MetaPathFinder):
    """Finds modules that no other finder finds."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files
        self.packages = {name.rpartition(".")[0] for name in files}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname in self.files:
            return spec_of_file(fullname, self.files[fullname])
        if any(f"{package}.".startswith(f"{fullname}.") for package in self.packages):
            return ModuleSpec(fullname, None, is_package=True)
        return None


def set_warnings() -> None:
    """Replace the caller's warning filters.

    Megatron and torch warn a lot on a machine without a GPU, and warnings of torch's C code are attributed to the
    calling Python function, which is often one of the stubs.
    """
    warnings.resetwarnings()
    warnings.filterwarnings("ignore", module=r"(megatron|torch|megapatch\.testing)\b")
    warnings.filterwarnings("error", module=r"megapatch\b(?!\.testing)")


def _end_with_caller(channel: Connection) -> None:
    """End this process and all that it started when the caller is gone, even if it was killed."""
    with contextlib.suppress(OSError):
        channel.poll(None)  # nothing is ever sent to a rank, so this returns only at the end of file
    os.killpg(0, signal.SIGKILL)


def _flush(*streams: IO[str]) -> None:
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
