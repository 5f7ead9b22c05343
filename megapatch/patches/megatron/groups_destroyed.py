"""Process groups of a layout that was taken down are destroyed before the next one is set up.

Symptom   each cycle of destroy_model_parallel() and initialize_model_parallel() leaves 16 or more process groups
          behind: with gloo about 50 threads and 70 file descriptors, with NCCL communicators and their memory on
          the GPU. A process that initializes often slows down, and ends out of memory or file descriptors.
Upstream  NVIDIA/Megatron-LM#6902, #6897 (open); 0.12 to 0.19.
Seam      initialize_model_parallel() notes the groups that it creates. After destroy_model_parallel() the next one
          begins by destroying them: it is a collective, so no rank can still be communicating in them, which
          destroy_model_parallel(), called by one rank after another, cannot know. A group that something else
          still refers to, such as a model that was kept, stays on all ranks, until a later one finds it unused.
Limits    the groups of the last layout stay until the process ends. Groups created before the patch was applied,
          or outside of initialize_model_parallel(), are left alone. References that C++ alone holds are not seen.
          A model that garbage collection does not free (after gc.freeze()) keeps its groups.
          All ranks need the patch, as the collective needs them all.
Cost      a collective of some bytes and a garbage collection in each initialize_model_parallel() but the first.
"""

from __future__ import annotations

import builtins
import functools
import logging
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from ..._mcore.process_groups import PARALLEL_STATE, destroy_unused, process_groups
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import (
    StandIn,
    cannot_run,
    lacking,
    missing_attributes,
    missing_names,
    real_imports_but,
    torch_stand_in,
)

INITIALIZE, DESTROY = "initialize_model_parallel", "destroy_model_parallel"
GROUPS = (  # every release from 0.12 to 0.19 sets them, and expects them to be None before that
    "_MODEL_PARALLEL_GROUP",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_PIPELINE_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_WITH_CP",
    "_CONTEXT_PARALLEL_GROUP",
    "_EMBEDDING_GROUP",
    "_POSITION_EMBEDDING_GROUP",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP",
    "_TENSOR_AND_DATA_PARALLEL_GROUP",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
    "_EXPERT_MODEL_PARALLEL_GROUP",
    "_EXPERT_TENSOR_PARALLEL_GROUP",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP",
)

logger = logging.getLogger("megapatch")


class _Layout:
    """The layout of this process, as far as it is known.

    Attributes:
        groups: its process groups.
        left: those of layouts that were taken down.
        world: the default process group when they were created; with another one, torch has destroyed them all.
    """

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.left: list[Any] = []
        self.world: Any = None


_layout = _Layout()


def diagnose(module: ModuleType) -> Verdict:
    """Run the real destroy_model_parallel() on made-up globals."""
    missing = [
        *missing_attributes(f"{PARALLEL_STATE}:", INITIALIZE),
        *missing_names(f"{PARALLEL_STATE}:{DESTROY}", *GROUPS),
    ]
    if missing:
        return lacking(missing)
    destroyed: list[Any] = []
    try:
        state = _state_after(unpatched(vars(module)[DESTROY]), destroyed)
    except Exception as error:
        return cannot_run(f"{DESTROY}()", error)
    if kept := [group for group in GROUPS if state[group] is not None]:
        return Verdict(UNKNOWN, f"expected {DESTROY}() to forget {', '.join(kept)}")
    if set(GROUPS) <= set(destroyed):
        return Verdict(FIXED, f"{DESTROY}() destroys the process groups")
    return Verdict(NEEDED, f"{DESTROY}() forgets the process groups and leaves them in place")


class _Idle:
    """A class or function of the module that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _state_after(destroy: FunctionType, destroyed: list[Any]) -> dict[str, Any]:
    """Return the globals after a call in which each group is a text, the name of its global."""

    def no_module() -> Any:
        raise ImportError("not in a diagnosis")  # what Megatron imports here may have something to destroy

    world = SimpleNamespace(pg_map={name: name for name in destroy.__globals__})
    torch = torch_stand_in(
        distributed=StandIn(
            distributed_c10d=SimpleNamespace(_world=world),
            destroy_process_group=destroyed.append,
            is_initialized=lambda: True,
        )
    )
    names = {name: _Idle() for name in destroy.__code__.co_names if name in destroy.__globals__}
    groups = {name: name for name in destroy.__code__.co_names if name.isupper()}
    imports = {"__import__": real_imports_but("megatron", no_module)}
    made_up = {"torch": torch, "__builtins__": {**vars(builtins), **imports}}
    namespace = {**names, **groups, **made_up}
    FunctionType(destroy.__code__, namespace, destroy.__name__, destroy.__defaults__, destroy.__closure__)()
    return namespace


def note_groups(initialize_model_parallel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialize_model_parallel)
    def patched_initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        # No list of all groups in a variable here: it would refer to them.
        world = next(iter(process_groups()), None)
        if world is not _layout.world:
            _layout.groups.clear()
            _layout.left.clear()
        if _layout.left:
            destroyed = destroy_unused(_layout.left)
            logger.debug("process groups of earlier layouts that were destroyed: %d", destroyed)
        count = len(process_groups())
        try:
            return initialize_model_parallel(*args, **kwargs)
        finally:
            _layout.groups += process_groups()[count:]
            _layout.world = world

    return patched_initialize_model_parallel


def leave_groups(destroy_model_parallel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(destroy_model_parallel)
    def patched_destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        result = destroy_model_parallel(*args, **kwargs)
        _layout.left += _layout.groups
        _layout.groups = []
        return result

    return patched_destroy_model_parallel


PATCH = Patch(
    name="megatron.groups-destroyed",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/6902",
    sites=(
        Site(
            module=PARALLEL_STATE,
            diagnose=diagnose,
            replace={INITIALIZE: note_groups, DESTROY: leave_groups},
        ),
    ),
)
