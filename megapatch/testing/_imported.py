"""Servers that have imported Megatron with the settings of a run, and fork its ranks.

A rank spends more time on that import than on most scenarios. The server is itself forked from the one that
`run_ranks` keeps, and does what a rank does before its job: environment, megapatch, stubs of torch.cuda, and then
Megatron, whose import megapatch sees.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from ._server import ensure_server, nothing_of_the_caller

_MOST = 4  # servers that are kept
_MODULES = (  # what init_parallel() and tiny_gpt() import
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
)
_START = """
import os
os.setpgid(0, 0)  # Ctrl-C is for the caller: without it this process ends
os.environ.clear()
os.environ.update(environment)
exec(first)
from megapatch.testing._imported import serve
serve(listener, alive, then)
"""

_servers: collections.OrderedDict[tuple[Any, ...], _Server] = collections.OrderedDict()


class _Server(forkserver.ForkServer):
    """One of multiprocessing's servers that is a child of another one."""

    # The names with an underscore are private (seen in CPython 3.10 to 3.13).
    def __init__(self, environment: Mapping[str, str], first: str, then: str) -> None:
        super().__init__()
        ensure_server()
        self._forkserver_address: Any = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        theirs, ours = multiprocessing.Pipe(duplex=False)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._forkserver_address)
            listener.listen()
            names = {"environment": dict(environment), "first": first, "then": then}
            # A daemon, so that the caller does not wait for it when it exits.
            self.process = multiprocessing.get_context("forkserver").Process(
                target=exec, args=(_START, {**names, "listener": listener, "alive": theirs}), daemon=True
            )
            with nothing_of_the_caller():
                self.process.start()
        theirs.close()
        self.alive = ours
        self._forkserver_alive_fd = ours.fileno()
        self._forkserver_pid = self.process.pid

    def ensure_running(self) -> None:
        assert self.process.is_alive(), "the server that has imported Megatron has ended"

    def close(self) -> None:
        self.alive.close()
        self.process.join()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._forkserver_address)


def forked_with(
    environment: Mapping[str, str], first: str = "", then: str = ""
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `run_ranks` forks ranks, on CPU, from a server with the settings in `environment`.

    Args:
        environment: all variables of the ranks. Those that begin with MEGAPATCH_ tell servers apart.
        first: source text that the server executes before all else.
        then: source text that it executes when it has imported Megatron.
    """
    if sys.version_info >= (3, 14):  # its servers ask for a key
        return contextlib.nullcontext()
    key = (first, then, *sorted(item for item in environment.items() if item[0].startswith("MEGAPATCH_")))
    server = _servers.pop(key, None) or _Server(environment, first, then)
    _servers[key] = server
    while len(_servers) > _MOST:
        _servers.popitem(last=False)[1].close()
    return mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process)


def close_servers() -> None:
    while _servers:
        _servers.popitem()[1].close()


def serve(listener: socket.socket, alive: Connection, then: str) -> None:
    """In the server, import Megatron as a rank would, and fork ranks until the caller has gone."""
    import torch
    import torch.distributed

    from . import _rank_process
    from ._cuda_stubs import install_cuda_stubs

    _rank_process.set_warnings()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    install_cuda_stubs()
    for name in _MODULES:
        with contextlib.suppress(BaseException):  # each rank meets the same error, and says so
            importlib.import_module(name)
    exec(then, {})
    forkserver.main(listener.detach(), alive.fileno(), [])
