"""After an exception in use_reference_model() the policy has its own weights again.

Symptom   an exception under `with worker.use_reference_model():`, such as one in get_reference_policy_logprobs(),
          leaves the reference's weights in the policy, silently: if the caller continues, it trains the reference.
          Also left: the sampling parameters without top-k and top-p, forward pre-hooks off (Megatron with
          overlap_param_gather), and on main's first DTensor worker a running timer, which makes the next call
          raise.
Upstream  v0.6.0, v0.7.0 and main at 7ea279abf, on the Megatron worker and both DTensor workers. Up to v0.5.0
          Megatron's had a `finally`; a reviewer asked for one in NVIDIA-NeMo/RL#2053.
Seam      the context manager: after an exception the original resumes behind its `yield`, as if there had been
          none, and swaps back itself everything that it swapped. The caller still gets the exception.
Limits    an exception while the reference's weights are being copied in, before the body has begun, is not rolled
          back. If the weights cannot be copied back, that error is raised, with the body's as its context.
Numbers   change after such an exception, to those of a run without it.
Cost      none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from ...patch import FIXED, NEEDED, UNKNOWN, Patch, Site, Verdict, unpatched
from .._diagnosis import expect_none, running, unmet
from .._ray_actors import actors_of, class_of
from ._workers import ACTOR, DTENSOR_WORKERS, MODULE, no_worker

SWAP = "use_reference_model"
ACTORS = {MODULE: ACTOR, **DTENSOR_WORKERS}


def diagnose(module: ModuleType) -> Verdict:
    """Run the real context manager on a stand-in without weights: does it restore after an exception?"""
    actor = ACTORS[module.__name__]
    worker = getattr(module, f"{actor}Impl", None)
    cls = worker or _class_of_actor(getattr(module, actor, None))
    if cls is None:
        return no_worker(module, actor)
    if worker is not None:
        expect_none(*unmet.attributes(f"{module.__name__}:{actor}Impl", SWAP))
    generator = getattr(unpatched(vars(cls).get(SWAP)), "__wrapped__", None)
    if not isinstance(generator, FunctionType):
        return Verdict(UNKNOWN, f"expected {cls.__name__}.{SWAP} to be made by contextlib.contextmanager")
    with running(f"{SWAP}()"):
        restores = _restores_after_exception(cls, generator)
    if restores:
        return Verdict(FIXED, f"{SWAP}() restores the policy's weights after an exception")
    if worker is None:
        return no_worker(module, actor)
    return Verdict(NEEDED, f"{SWAP}() leaves the reference's weights in the policy after an exception")


def _class_of_actor(actor: Any) -> Any:
    """Return the class that has the method up to v0.5.0, where the actor class has no base; None without Ray."""
    return class_of(actor) if hasattr(actor, "__ray_metadata__") else None


class _Raised(Exception):
    """Raised by the body of the stand-in's `with`."""


def _restores_after_exception(cls: type, generator: FunctionType) -> bool:
    """Whether it reads or loads the model's state dict again after an exception at its `yield`."""
    looks: list[str] = []

    def empty(*args: Any, **kwargs: Any) -> dict[str, Any]:
        looks.append("state dict")
        return {}

    stand_in: Any = object.__new__(cls)
    vars(stand_in).update(
        model=SimpleNamespace(state_dict=empty, load_state_dict=empty),
        reference_state_dict={},
        reference_model_state_dict={},
        should_disable_forward_pre_hook=False,
        sampling_params=None,
        cfg={"megatron_cfg": {"empty_unused_memory_level": 0}},
        timer=SimpleNamespace(start=lambda *ignored: None, stop=lambda *ignored: None),
    )
    # get_cpu_state_dict() synchronizes with the GPU.
    known = {**generator.__globals__, "get_cpu_state_dict": lambda *args, **kwargs: {}}
    swap = FunctionType(generator.__code__, known, generator.__name__, None, generator.__closure__)(stand_in)
    next(swap)
    before = len(looks)
    with contextlib.suppress(_Raised):
        swap.throw(_Raised())
    return len(looks) > before


def with_rollback(use_reference_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(use_reference_model)
    def patched_use_reference_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _always_left(use_reference_model(self, *args, **kwargs))

    return patched_use_reference_model


@contextlib.contextmanager
def _always_left(swap: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
    value = swap.__enter__()
    try:
        yield value
    finally:
        swap.__exit__(None, None, None)


PATCH = Patch(
    name="nemo_rl.reference-model-rollback",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/2053",
    sites=tuple(
        Site(module, diagnose, replace={f"{actor}Impl.{SWAP}": with_rollback}, rebuild=actors_of(f"{actor}Impl"))
        for module, actor in ACTORS.items()
    ),
    changes_numbers=True,
)
