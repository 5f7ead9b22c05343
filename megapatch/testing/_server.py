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


def ensure_server() -> None:
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
def no_main_module() -> Iterator[None]:
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


@contextlib.contextmanager
def server_of_a_program() -> Iterator[None]:
    """Start the server for a command-line program; on Ctrl-C, end it.

    The server ignores SIGINT, which a terminal sends to it as well: it would print a traceback. It is killed
    because, while it imports torch, it does not notice that we have gone, and would still start a rank afterwards.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
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
