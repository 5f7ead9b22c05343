"""A save is finished with the results of its own writer, not with those of a save that was given up.

Symptom   an asynchronous save that was written and never finalized (the trainer caught an exception and continued)
          leaves its results in a queue of the process. Each later save, synchronous ones too, then takes the
          results of the save before it, and returns normally. Its metadata describe another checkpoint: loading
          gives tensors each other's values, silently, or ends with "KeyError: MetadataIndex(...)" or an EOFError.
          Two saves that are under way at the same time get each other's results when the second ends first.
Upstream  in 0.12 to 0.19 and on main, and in nvidia-resiliency-ext 0.4 to 0.7: the queue does not say whose
          results it holds. Megatron-Bridge makes a new queue after a save that it aborts itself (NVIDIA-NeMo/
          Megatron-Bridge#4839, #5842).
Seam      the class attributes of FileSystemWriterAsync, in Megatron and in nvidia-resiliency-ext. After
          prepare_write_data the writer gets a queue of its own, from the manager process of the common one.
          retrieve_write_results reads the writer's queue, as before.
Limits    a save that was given up stays incomplete, unless it is finalized later; then it is complete.
Numbers   change where a load would have given tensors each other's values: to those that were saved.
Cost      a save asks the manager for one queue, below 10 ms on a busy machine. That of a save given up is kept.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict
from .._diagnosis import StandIn, expect_none, running, unmet, with_globals

MEGATRON = "megatron.core.dist_checkpointing.strategies.filesystem_async"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"
WRITER = "FileSystemWriterAsync"
QUEUE = "results_queue"
COMMON = "_results_queue"
"""The global that all writers share."""
GETTERS = ("get_write_results_queue", "_get_write_results_queue")
"""The function that makes the common queue; from Megatron 0.17 and NVRx 0.6 on it is public."""

_unread: set[Any] = set()
"""Queues that have not been read: without this process's reference, a worker could not open one any more."""


def with_own_queue(prepare_write_data: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare_write_data)
    def patched_prepare_write_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = prepare_write_data(self, *args, **kwargs)
        # A proxy's manager (multiprocessing.managers.BaseProxy, Python 3.10 to 3.14), by which Megatron's own
        # reset_persistent_async_worker() shuts it down. A second manager would be a process more.
        if (manager := getattr(getattr(self, QUEUE), "_manager", None)) is not None:
            own = manager.Queue()
            setattr(self, QUEUE, own)
            _unread.add(own)
        return result

    return patched_prepare_write_data


def then_let_go(retrieve_write_results: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(retrieve_write_results)
    def patched_retrieve_write_results(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return retrieve_write_results(self, *args, **kwargs)
        finally:
            _unread.discard(getattr(self, QUEUE))

    return patched_retrieve_write_results


# ------------------------------------------------------------------------------------------ the diagnosis
def diagnose(module: ModuleType) -> Verdict:
    """Prepare two saves of one object with the real code, with a made-up manager in place of a new process."""
    writer = f"{module.__name__}:{WRITER}"
    getters = [name for name in GETTERS if hasattr(module, name)]
    expect_none(
        *unmet.names(f"{writer}.prepare_write_data", QUEUE),
        *unmet.reads(f"{writer}.get_save_function_and_args", QUEUE),
        *unmet.reads(f"{writer}.retrieve_write_results", QUEUE, "get_nowait"),
        *([] if getters else [f"{module.__name__}:{' or '.join(GETTERS)}"]),
        # Else the diagnosis could start a real process.
        *(text for name in getters for text in unmet.reads(f"{module.__name__}:{name}", "mp", COMMON)),
    )
    with running("prepare_write_data()"):
        first, second = _queues_of_two(module, getters)
    if not isinstance(first, _Made) or not isinstance(second, _Made):
        return Verdict(UNKNOWN, "expected a save to take its results from a queue of a manager; it does not")
    if first is second:
        return Verdict(NEEDED, "all saves of a process share one queue for their results")
    return Verdict(FIXED, "each save has a queue of its own for its results")


class _Made:
    """A queue of the made-up manager."""


def _queues_of_two(module: ModuleType, getters: list[str]) -> list[Any]:
    """Return the queues of two writers. Only copies of the functions run: the module keeps its own queue."""
    manager = StandIn(Queue=lambda *args, **kwargs: _Made())
    context = StandIn(Manager=lambda: manager)
    names = {"mp": StandIn(get_context=lambda *args, **kwargs: context), COMMON: None}
    copies = {name: with_globals(getattr(module, name), **names) for name in getters}
    prepare = with_globals(getattr(module, WRITER).prepare_write_data, **names, **copies)
    item = StandIn(type=vars(module)["WriteItemType"].BYTE_IO, index=StandIn(fqn="key"))
    plan = StandIn(items=[item], storage_data=StandIn(prefix="__0_"))
    found = []
    for folder in ("one", "another"):
        writer = StandIn(thread_count=1, path=pathlib.Path(folder), checkpoint_dir=folder)
        prepare(writer, plan, SimpleNamespace(resolve_data=lambda item: None))
        found.append(getattr(writer, QUEUE))
    return found


PATCH = Patch(
    name="megatron.own-save-results",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5842",
    changes_numbers=True,
    sites=tuple(
        Site(
            module,
            diagnose,
            replace={
                f"{WRITER}.prepare_write_data": with_own_queue,
                f"{WRITER}.retrieve_write_results": then_let_go,
            },
        )
        for module in (MEGATRON, NVRX)
    ),
)
