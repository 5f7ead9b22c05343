"""The diagnoses of megatron.save-fails-everywhere: what a rank does after its part of a save has failed.

Copies of the real functions run on one rank, with stand-ins for what is collective.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, NotAsExpected, Verdict, unpatched
from .._diagnosis import (
    StandIn,
    expect_none,
    gone,
    reads_in_order,
    running,
    torch_stand_in,
    unmet,
    with_globals,
)

FINALIZE = "save_state_dict_async_finalize"
MANIFEST = "save_integrity_manifest"
QUEUE = "AsyncCallsQueue"
COLLECTIVES = ("barrier", "broadcast", "all_reduce", "broadcast_object_list", "all_gather_object")


class _Failed(Exception):
    """What the work raises."""


class _Rank:
    """A rank whose work fails, and the collectives that it calls afterwards."""

    def __init__(self) -> None:
        self.has_failed = False
        self.collectives: list[str] = []
        self.torch = torch_stand_in(
            distributed=StandIn(
                ReduceOp=StandIn(),
                get_rank=lambda *args: 0,
                **{name: functools.partial(self._note, name) for name in COLLECTIVES},
            ),
            tensor=lambda values, **kwargs: sys.modules["torch"].tensor(values),
            cuda=StandIn(current_device=lambda: None),
        )

    def _note(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self.has_failed:
            self.collectives.append(name)

    def fail(self, *args: Any, **kwargs: Any) -> None:
        self.has_failed = True
        raise _Failed

    def verdict(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Verdict:
        """Return the verdict on a function of which the work is a part."""
        with running(f"{what}()"):
            try:
                function(*args, **kwargs)
            except Exception as error:
                if not self.has_failed:
                    raise
                if not self.collectives and isinstance(error, _Failed):
                    return Verdict(NEEDED, f"a rank that fails in {what}() leaves the others to wait for it")
        if self.collectives:
            return Verdict(FIXED, f"a rank that fails in {what}() meets the others")
        return Verdict(UNKNOWN, f"expected {what}() to raise where its work fails; it does not")


def diagnose_finalize(module: ModuleType) -> Verdict:
    """Finalize the tensors of a save whose metadata cannot be written."""
    path = f"{module.__name__}:{FINALIZE}"
    expect_none(
        *unmet.parameters(path, "storage_writer", "global_metadata", "dist_wrapper"),
        *unmet.reads(path, "retrieve_write_results", "gather_object", "finish", "is_coordinator"),
    )
    rank = _Rank()
    writer = StandIn(retrieve_write_results=list, finish=rank.fail)
    ranks = StandIn(is_coordinator=True, coordinator_rank=0, gather_object=lambda found: [found])
    finalize = with_globals(getattr(module, FINALIZE), torch=rank.torch)
    return rank.verdict(FINALIZE, finalize, writer, object(), ranks)


def diagnose_checkpoint(module: ModuleType) -> Verdict:
    """Finalize a checkpoint whose configuration cannot be written: a function inside save()."""
    path = f"{module.__name__}:save"
    expect_none(
        *unmet.attributes(f"{module.__name__}:", "save_config"),
        *unmet.reads(path, "finalize_fns", "save_config", "barrier"),
    )
    function = unpatched(module.save)
    codes = [code for code in function.__code__.co_consts if isinstance(code, CodeType)]
    code = next((code for code in codes if {"save_config", "barrier"} <= {*code.co_names}), None)
    if code is None:
        raise NotAsExpected(f"expected but not found: a function in {path} that reads save_config and barrier")
    rank = _Rank()
    stand_ins = {"torch": rank.torch, "save_config": rank.fail, "CheckpointingConfig": lambda *args: None}
    cells = tuple(CellType(StandIn()) for _ in code.co_freevars)
    finalize = FunctionType(code, {**function.__globals__, **stand_ins}, code.co_name, None, cells)
    return rank.verdict(code.co_name, finalize)


def diagnose_manifest(module: ModuleType) -> Verdict:
    """Look whether there is a manifest of hashes, and whether writing it is left to one rank."""
    if not hasattr(module, MANIFEST):
        return gone(MANIFEST, module, _without_manifests)
    path = f"{module.__name__}:{MANIFEST}"
    expect_none(*unmet.parameters(path, "checkpoint_dir"))
    if reads_in_order(getattr(module, MANIFEST), "distributed"):
        return Verdict(UNKNOWN, f"expected {MANIFEST}() to be the work of one rank; it calls others")
    return Verdict(NEEDED, "a rank that fails to write the manifest leaves the others to wait for it")


def _without_manifests(module: ModuleType) -> str:
    return "" if hasattr(module, "verify_integrity_manifest") else "checkpoints have no manifest, before 0.17.1"


def diagnose_queue(module: ModuleType) -> Verdict:
    """Finalize a request that a queue has, whose finalize function fails."""
    maybe_finalize = f"{module.__name__}:{QUEUE}.maybe_finalize_async_calls"
    schedule = f"{module.__name__}:{QUEUE}.schedule_async_request"
    expect_none(
        *unmet.attributes(f"{module.__name__}:", "AsyncRequest", "_ActiveAsyncRequest"),
        *unmet.names(maybe_finalize, "async_calls", "blocking"),
        *unmet.parameters(schedule, "async_request"),
        *unmet.reads(schedule, "async_calls"),
    )
    rank = _Rank()
    caller = StandIn(is_current_async_call_done=lambda *args, **kwargs: True)
    # In early 2025 main's queue kept the list of functions in the request's place: the same one fails there.
    active = vars(module)["_ActiveAsyncRequest"](0, caller, module.AsyncRequest(rank.fail, (), [rank.fail]))
    finalize = with_globals(getattr(module, QUEUE).maybe_finalize_async_calls, torch=rank.torch)
    return rank.verdict(
        "maybe_finalize_async_calls", finalize, StandIn(async_calls=deque([active])), blocking=True
    )


def diagnose_request(module: ModuleType) -> Verdict:
    """Finalize a request whose finalize function fails."""
    path = f"{module.__name__}:AsyncRequest.execute_finalize_fns"
    expect_none(*unmet.parameters(path, "validate_matching_call_idx"), *unmet.reads(path, "finalize_fns"))
    rank = _Rank()
    finalize = with_globals(module.AsyncRequest.execute_finalize_fns, torch=rank.torch)
    request = module.AsyncRequest(None, (), [rank.fail])
    return rank.verdict("execute_finalize_fns", finalize, request, validate_matching_call_idx=True)
