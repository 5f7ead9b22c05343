"""Process groups of a layout that was taken down are destroyed before the next one is set up.

Symptom   each cycle of destroy_model_parallel() and initialize_model_parallel() leaves 16 or more process groups
          behind: with gloo about 50 threads and 70 file descriptors, with NCCL communicators and their memory on
          the GPU. A process that initializes often slows down, and ends out of memory or file descriptors.
          A layout without hierarchical context parallelism has the hierarchical groups of one before it; in 0.12
          one with them has both. So has one without hybrid context parallelism.
Upstream  NVIDIA/Megatron-LM#6902, #6897 (open), #7139; 0.12 to 0.19.
Seam      initialize_model_parallel() notes the groups that it creates. After destroy_model_parallel() the next one
          begins by destroying them: it is a collective, so no rank can still be communicating in them, which
          destroy_model_parallel(), called by one rank after another, cannot know. A group that something else
          still refers to, such as a model that was kept, stays on all ranks, until a later one finds it unused.
          Globals that destroy_model_parallel() has left as initialize_model_parallel() set them are as before it.
          Megatron's cache of rotary tables, which keeps modules and their groups, is emptied: they are made again.
Limits    the groups of the last layout stay until the process ends, and globals that Megatron does not reset until
          the next layout. Groups and globals of a layout from before the patch was applied, and groups created
          outside of initialize_model_parallel(), are left alone.
          A model that is dropped keeps its groups until Python's garbage collection frees it.
          A group of an earlier layout that is kept by its name alone is destroyed.
          Groups that a rank has set up without the patch stay on all of its ranks. A rank must not lose the patch
          (restore()) while others keep it.
Cost      four operations of the default group's store and a collective of some bytes in each
          initialize_model_parallel(), in the first one an operation of the store.
"""

from __future__ import annotations

import builtins
import copy
import functools
import logging
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from ..._mcore.process_groups import PARALLEL_STATE, Noted, groups_made, process_groups
from ..._python.dotted import find
from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import Idle, StandIn, codes_of, expect_none, real_imports_but, running, torch_stand_in, unmet

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

EMBEDDINGS = "megatron.core.models.common.embeddings"
ROTARY = {"rotary_pos_embedding": "RotaryEmbedding", "yarn_rotary_pos_embedding": "YarnRotaryEmbedding"}

logger = logging.getLogger("megapatch")


class _Layout:
    """The layout of this process, as far as it is known.

    Attributes:
        groups: its process groups.
        left: those of layouts that were taken down.
        globals: the globals that were set with them, by name: the values before that and after.
        begun: the last call that began to set up a layout.
        noted: the call that set up this one, until it is known whether all ranks have noted it.
        world: the default process group when they were created; with another one, torch has destroyed them all.
        worlds: the number of default process groups.
    """

    def __init__(self) -> None:
        self.world: Any = None
        self.worlds = 0
        self.forget()

    def forget(self) -> None:
        self.groups: list[Any] = []
        self.globals: dict[str, tuple[Any, Any]] = {}
        self.left: list[Any] = []
        self.begun: Noted | None = None
        self.noted: Noted | None = None

    def begin(self, world: Any) -> None:
        """Destroy groups of earlier layouts, and note that one is being set up."""
        if world is not self.world:
            self.forget()
            self.world, self.worlds = world, self.worlds + 1
        state = vars(sys.modules[PARALLEL_STATE])
        if all(state.get(name) is None for name in GROUPS):  # otherwise Megatron raises
            self.left += self.groups
            self.groups = []
            self._reset(state)
            _forget_rotary_tables()
            if self.noted is not None and self.noted.by_all():
                from ..._mcore.leftover_groups import destroy_unused  # most processes keep their first layout

                number = destroy_unused(self.left)
                logger.debug("process groups of earlier layouts that were destroyed: %d", number)
            self.noted = None
        place = f"layout {self.worlds}.{groups_made()}"
        if self.begun is None or self.begun.place != place:
            self.begun = _noted(place)

    def _reset(self, state: dict[str, Any]) -> None:
        """Give the globals that nobody has set since then the values from before the layout."""
        for name, (before, after) in self.globals.items():
            if state.get(name) is after:
                state[name] = before
        self.globals = {}

    def end(self, groups: list[Any], before: dict[str, Any]) -> None:
        if groups:
            self.groups += groups
            self.noted = self.begun
        state = vars(sys.modules[PARALLEL_STATE])
        after = {name: state.get(name) for name in before}
        self.globals |= {name: (value, after[name]) for name, value in before.items() if after[name] != value}


def _noted(place: str) -> Noted | None:
    try:
        return Noted(place)
    except Exception:  # no store (MPI), or one that does not count (of a fake backend)
        return None


def _forget_rotary_tables() -> None:
    """Drop the cached tables of rotary embeddings, whose keys keep modules and groups of models that are gone."""
    for module, kind in ROTARY.items():
        clear = find(sys.modules.get(f"{EMBEDDINGS}.{module}"), f"{kind}.forward.cache_clear")
        if clear is not None:
            clear()


_layout = _Layout()


def diagnose(module: ModuleType) -> Verdict:
    """Run the real destroy_model_parallel() on made-up globals."""
    expect_none(
        *unmet.attributes(f"{PARALLEL_STATE}:", INITIALIZE),
        *unmet.names(f"{PARALLEL_STATE}:{DESTROY}", *GROUPS),
    )
    destroyed: list[Any] = []
    with running(f"{DESTROY}()"):
        state = _state_after(unpatched(vars(module)[DESTROY]), destroyed)
    if kept := [group for group in GROUPS if state[group] is not None]:
        return Verdict(UNKNOWN, f"expected {DESTROY}() to forget {', '.join(kept)}")
    if set(GROUPS) <= set(destroyed):
        return Verdict(FIXED, f"{DESTROY}() destroys the process groups")
    return Verdict(NEEDED, f"{DESTROY}() forgets the process groups and leaves them in place")


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
    names = {name: Idle() for name in destroy.__code__.co_names if name in destroy.__globals__}
    groups = {name: name for name in destroy.__code__.co_names if name.isupper()}
    imports = {"__import__": real_imports_but("megatron", no_module)}
    made_up = {"torch": torch, "__builtins__": {**vars(builtins), **imports}}
    namespace = {**names, **groups, **made_up}
    FunctionType(destroy.__code__, namespace, destroy.__name__, destroy.__defaults__, destroy.__closure__)()
    return namespace


def _globals_of(initialize: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the globals that the function's code names, lists and dictionaries copied."""
    names = {name for code in codes_of(initialize) for name in code.co_names}

    def values() -> dict[str, Any]:
        state = vars(sys.modules[PARALLEL_STATE])
        found = {name: state.get(name) for name in names}
        return {
            name: copy.copy(value) if isinstance(value, (list, dict)) else value for name, value in found.items()
        }

    return values


def note_groups(initialize_model_parallel: Callable[..., Any]) -> Callable[..., Any]:
    values = _globals_of(initialize_model_parallel)

    @functools.wraps(initialize_model_parallel)
    def patched_initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        # No list of all groups in a variable here: it would refer to them.
        if (world := next(iter(process_groups()), None)) is not None:  # otherwise Megatron raises
            _layout.begin(world)
        count, before = len(process_groups()), values()
        try:
            return initialize_model_parallel(*args, **kwargs)
        finally:
            _layout.end(process_groups()[count:], before)

    return patched_initialize_model_parallel


PATCH = Patch(
    name="megatron.groups-destroyed",
    doc=__doc__,
    upstream="https://github.com/NVIDIA/Megatron-LM/issues/6902",
    sites=(Site(PARALLEL_STATE, diagnose, replace={INITIALIZE: note_groups}),),
    leaves=(
        ("process.groups", "those of earlier layouts are gone once the next one is set up"),
        ("process.files", "so are their sockets"),
        ("RotaryEmbedding.forward", "its cache is empty then"),
    ),
)
