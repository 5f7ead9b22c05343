"""A pytest plugin that runs tests for GPUs and NCCL on CPU: `pytest -p upstream.plugin`, once for each rank.

"cuda" is the CPU, by the stubs of `megapatch.testing`; NCCL is gloo with one thread a group, and AVG the sum of
what is divided. Ranks meet after each test. Where it failed on one of them, that rank closes its connections, so
that the others do not wait for it, and all of them drop their groups.

Environment: RANK and WORLD_SIZE; UPSTREAM_PORT of the store in which ranks meet; UPSTREAM_FOLDER for a file of
results a rank, which has a line when a test begins and one when it ends; UPSTREAM_PATCHED=1 for megapatch, =audit
for its audit as well, whose findings fail a test. Without it nothing of megapatch stays imported.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import resource
import socket
import sys
import types
from datetime import timedelta
from pathlib import Path

import pytest
from packaging.version import Version
from rigs.alone import import_alone
from rigs.stand_ins import OF_GPUS, ForImporters

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = Path(os.environ["UPSTREAM_FOLDER"])
TIMEOUT = timedelta(seconds=30)
DATA = "tests.test_utils.python_scripts.download_unit_tests_dataset"
"""Megatron's conftest downloads data by it."""


import_alone("testing._cuda_stubs").install_cuda_stubs()
import_alone("testing._gloo").use_one_gloo_thread()

import torch  # noqa: E402 (after the stubs)
import torch.distributed as dist  # noqa: E402

torch.cuda.is_available = lambda: True  # many tests would be skipped
store = dist.TCPStore("127.0.0.1", int(os.environ["UPSTREAM_PORT"]), WORLD, RANK == 0, timedelta(seconds=120))
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
_own_sockets = set(os.listdir("/proc/self/fd"))
_worlds = 0
"""How many worlds were made: each has a part of the store for itself. Ranks agree about it when they meet."""


# ------------------------------------------------------------------------------------------ the collectives
def _replace(name):
    """Put a function in the place of one of torch.distributed, which it gets first."""

    def replace(function):
        original = getattr(dist, name)
        replacement = functools.wraps(original)(functools.partial(function, original))
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, replacement)

    return replace


@_replace("init_process_group")
def _init(init_process_group, backend=None, *args, world_size=WORLD, rank=RANK, **kwargs):
    global _worlds
    _worlds += 1
    # Of a smaller world not all ranks are members.
    world = dist.PrefixStore(f"world {_worlds}", store)
    init_process_group("gloo", store=world, world_size=max(world_size, 1), rank=max(rank, 0), timeout=TIMEOUT)


@_replace("new_group")
def _group(new_group, ranks=None, timeout=None, backend=None, pg_options=None, *args, **kwargs):
    return new_group(ranks, TIMEOUT, "gloo", None, *args, **kwargs)


@_replace("rendezvous")
def _rendezvous(rendezvous, url, rank=RANK, world_size=WORLD, **kwargs):
    yield dist.PrefixStore("rendezvous", store), rank, world_size


@_replace("all_reduce")
def _all_reduce(all_reduce, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    if op == dist.ReduceOp.AVG:
        tensor, op = tensor.div_(dist.get_world_size(group)), dist.ReduceOp.SUM
    return all_reduce(tensor, op, group, async_op)


def _reduce_scatter(reduce_scatter, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
    if op == dist.ReduceOp.AVG:
        input, op = input / dist.get_world_size(group), dist.ReduceOp.SUM
    return reduce_scatter(output, input, op, group, async_op)


for _name in ("reduce_scatter_tensor", "_reduce_scatter_base"):
    _replace(_name)(_reduce_scatter)


# ------------------------------------------------------------------------------------------ meeting
def _hang_up():
    """Close the connections to other ranks: they get an error wherever they wait for this one."""
    for number in {*os.listdir("/proc/self/fd")} - _own_sockets:
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=int(number))  # raises for other files
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(OSError):  # of one that listens
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
            connection.detach()


def _meet(test, failed):
    """Wait for the other ranks at the end of a test, and drop groups that are of no further use."""
    global _worlds
    state = sys.modules.get("megatron.core.parallel_state")
    has_layout = getattr(state, "model_parallel_is_initialized", bool)  # tests of trainers replace the module
    if failed or not has_layout():  # nobody destroys the groups of a layout
        store.add(f"drop {test}", 1)
    store.set(f"worlds {test} {RANK}", str(_worlds))
    keys = [f"worlds {test} {rank}" for rank in range(WORLD)]
    store.wait(keys, timedelta(seconds=600))
    _worlds = max(int(store.get(key)) for key in keys)
    if store.add(f"drop {test}", 0):
        _drop_groups(state)


def _drop_groups(state):
    """Destroy all process groups, and have Megatron forget them."""
    for module, destroy in ((state, "destroy_model_parallel"), (dist, "destroy_process_group")):
        with contextlib.suppress(Exception):
            getattr(module, destroy)()
    if utilities := sys.modules.get("tests.unit_tests.test_utilities"):
        utilities.Utils.inited = False
    gc.collect()


# ------------------------------------------------------------------------------------------ calls
calls = collections.Counter()
"""Of replacement functions of patches, in the test that runs, by the patch's file. From Python 3.12 on."""


def _count(code, offset):
    if "/megapatch/patches/" not in code.co_filename or not code.co_name.startswith("patched_"):
        return sys.monitoring.DISABLE
    calls[Path(code.co_filename).stem] += 1
    return None


MODE = os.environ.get("UPSTREAM_PATCHED")
if MODE:
    if MODE == "audit":
        os.environ.update(MEGAPATCH_AUDIT="1", MEGAPATCH_AUDIT_EVERY="1")
    import megapatch  # (it activates itself)

    if monitoring := getattr(sys, "monitoring", None):
        monitoring.use_tool_id(monitoring.PROFILER_ID, "upstream.plugin")
        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, _count)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)
        atexit.register(monitoring.set_events, monitoring.PROFILER_ID, 0)
sys.modules[DATA] = types.ModuleType(DATA)
sys.modules[DATA].download_and_extract_asset = lambda *args, **kwargs: None


def _do_without_transformer_engine():
    """Give models Megatron's own layers."""
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    for kind in ("spec", "submodules"):
        local = getattr(specs, f"get_gpt_layer_local_{kind}", None)
        if local:
            setattr(specs, f"get_gpt_layer_with_transformer_engine_{kind}", functools.partial(_call_known, local))
    utilities = importlib.import_module("megatron.core.utils")
    try:
        utilities.is_te_min_version("1.3")
    except TypeError:  # 0.16 compares None with it, in a fixture, and asks for a name of it
        utilities.get_te_version = lambda: Version("0")
        vars(importlib.import_module("megatron.core.transformer.moe.moe_utils")).setdefault("te_general_gemm")


def _call_known(function, *args, **kwargs):
    known = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in kwargs.items() if name in known})


if importlib.util.find_spec("transformer_engine") is None:
    _do_without_transformer_engine()


sys.meta_path.append(ForImporters(("megatron.bridge", "tests."), OF_GPUS))


# ------------------------------------------------------------------------------------------ hooks
_results = (FOLDER / f"{RANK}.jsonl").open("a", buffering=1)
_reports = []


def pytest_collection_modifyitems(config, items):
    """Leave out tests that an earlier process has run."""
    done = FOLDER / "done.json"
    names = set(json.loads(done.read_text())) if done.exists() else set()
    items[:] = [item for item in items if item.nodeid not in names]


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    _reports.clear()
    calls.clear()
    _results.write(json.dumps({"test": item.nodeid}) + "\n")
    result = yield
    outcomes = {report.outcome for report in _reports}
    outcome = next((name for name in ("failed", "skipped") if name in outcomes), "passed")
    why = next((str(report.longrepr)[-400:] for report in _reports if report.outcome == outcome != "passed"), "")
    if MODE == "audit":
        found = "\n".join(map(str, megapatch.audit.findings()))
        megapatch.audit.clear()
        outcome, why = ("failed", found) if found else (outcome, why)
    line = {"test": item.nodeid, "outcome": outcome, "calls": dict(calls), "why": why}
    _results.write(json.dumps(line) + "\n")
    _meet(item.nodeid, outcome == "failed")
    return result


def pytest_runtest_logreport(report):
    _reports.append(report)
    if report.outcome == "failed":
        _hang_up()
