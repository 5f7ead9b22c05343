"""The server that forks the ranks' processes, and the settings while they are started."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import types
from collections.abc import Iterator

# Megatron's imports that take most of its import time. The server leaves out those that are not installed. Not
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

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""With it multiprocessing's `python -c`, of servers and of children, has no working directory on its path: from
Python 3.11 on."""


def ensure_server() -> None:
    """Start multiprocessing's fork server if it is not running yet, with torch imported and a single thread.

    If another library has started it without torch, that works as well, but is slower.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    # Forking a process with threads is unsafe. Inductor of older torches starts some when it is imported.
    # ensure_running() is not documented (seen in CPython 3.6 to 3.13). Without it the first process would start
    # the server, when these variables are no longer set.
    with _environment(**SAFE_PATH, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", TORCH_WARM_POOL="0"):
        multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def nothing_of_the_caller() -> Iterator[None]:
    """Hide the caller's script and working directory from the processes that multiprocessing starts.

    The script would run in the child before all else, when the environment is not set; the child runs it later, if
    needed. The child then takes the caller's sys.path, so that it finds the caller's modules.
    """
    # multiprocessing.spawn.get_preparation_data() reads sys.modules["__main__"] when a process starts (seen in
    # CPython 3.6 to 3.13): https://github.com/python/cpython/blob/v3.13.0/Lib/multiprocessing/spawn.py#L192
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with _environment(**SAFE_PATH):
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


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """Work in a folder where only root can put files: for a program, as another thread would find itself there."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    before = os.getcwd()
    with _environment(PYTHONPATH=os.pathsep.join(os.path.abspath(folder) for folder in folders if folder)):
        os.chdir(os.sep)
        try:
            yield
        finally:
            os.chdir(before)


@contextlib.contextmanager
def server_of_a_program() -> Iterator[None]:
    """Start the server for a command-line program; on Ctrl-C, end it.

    The server ignores SIGINT, which a terminal sends to it as well: it would print a traceback. It is killed
    because, while it imports torch, it does not notice that we have gone, and would still start a rank afterwards.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _elsewhere() if sys.version_info < (3, 11) else contextlib.nullcontext():
            ensure_server()
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield
    except KeyboardInterrupt:
        # CPython 3.10 to 3.14 have this attribute; without it the server ends some seconds after us.
        if server := getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None):
            os.kill(server, signal.SIGKILL)
        raise
