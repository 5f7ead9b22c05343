"""Servers that have imported Megatron, with the settings of a run, and fork its ranks.

A rank spends half a second on that import, more than on most cells. The server is itself forked from the one that
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
from multiprocessing import connection, forkserver
from unittest import mock

from megapatch.testing import run_ranks
from megapatch.testing._server import ensure_server, nothing_of_the_caller
from rigs.where import missing

MOST = 4  # servers that are kept
MODULES = (  # what init_parallel() and tiny_gpt() import
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
)

WITHOUT_MEGAPATCH = {"RIGS_WITHOUT_MEGAPATCH": "1"}
"""The environment of ranks that never activate megapatch, and import only its helpers for tests."""

START = """
import os
os.environ.clear()
os.environ.update(environment)
if "RIGS_WITHOUT_MEGAPATCH" in os.environ:
    # The package without its body, which would activate it: modules below it can be imported.
    import importlib.util, sys
    sys.modules["megapatch"] = importlib.util.module_from_spec(importlib.util.find_spec("megapatch"))
import megapatch.testing._rank_process
from rigs.imported import serve
serve(listener, alive)
"""

_servers: collections.OrderedDict[tuple, Server] = collections.OrderedDict()


class Server(forkserver.ForkServer):
    """One of multiprocessing's servers that is a child of another one."""

    # The names with an underscore are private (seen in CPython 3.10 to 3.13).
    def __init__(self, environment):
        super().__init__()
        ensure_server()
        self._forkserver_address = connection.arbitrary_address("AF_UNIX")
        theirs, ours = multiprocessing.Pipe(duplex=False)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._forkserver_address)
            listener.listen()
            names = {"environment": environment, "listener": listener, "alive": theirs}
            # A daemon, so that the caller does not wait for it when it exits.
            self.process = multiprocessing.get_context("forkserver").Process(
                target=exec, args=(START, names), daemon=True
            )
            with nothing_of_the_caller():
                self.process.start()
        theirs.close()
        self.alive = ours
        self._forkserver_alive_fd = ours.fileno()
        self._forkserver_pid = self.process.pid

    def ensure_running(self):
        assert self.process.is_alive(), "the server that has imported Megatron has ended"

    def close(self):
        self.alive.close()
        self.process.join()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._forkserver_address)


def after_megatron(setup):
    """Mark the setup of a rank as one that does the same when Megatron has been imported before it."""
    setup.after_megatron = True
    return setup


def run_with_megatron(function, world_size, *args, **options):
    """`run_ranks` in ranks that have imported Megatron when they begin.

    With a `setup` they have only if that is marked with `after_megatron`: others come before Megatron.

    Tests of imports, and of what a program does from its first line, call `run_ranks` itself; so do runs that are
    the only ones with their MEGAPATCH_*, for which a server would not pay.
    """
    setup = options.get("setup")
    comes_first = setup is not None and not getattr(setup, "after_megatron", False)
    if comes_first or options.get("device", "cpu") != "cpu" or missing():
        return run_ranks(function, world_size, *args, **options)
    with forked_with({**os.environ, **(options.get("env") or {})}):
        return run_ranks(function, world_size, *args, **options)


def forked_with(environment):
    """Return a context in which `run_ranks` forks ranks from a server with the MEGAPATCH_* of this environment."""
    key = tuple(sorted(item for item in environment.items() if item[0].startswith(("MEGAPATCH_", "RIGS_"))))
    server = _servers.pop(key, None) or Server(environment)
    _servers[key] = server
    while len(_servers) > MOST:
        _servers.popitem(last=False)[1].close()
    return mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process)


# --------------------------------------------------------------------------------------- in the server
def serve(listener, alive):
    """Import Megatron as a rank would, and fork ranks until the caller has gone."""
    import torch
    import torch.distributed

    from megapatch.testing import _rank_process
    from megapatch.testing._cuda_stubs import install_cuda_stubs

    _rank_process._set_warnings()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    install_cuda_stubs()
    for name in MODULES:
        importlib.import_module(name)
    forkserver.main(listener.detach(), alive.fileno(), [])
