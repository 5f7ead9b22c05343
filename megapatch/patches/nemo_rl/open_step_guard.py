"""Calls that would lose the gradients of an open train step are refused.

Symptom   between begin_train_step and finish_train_step the worker prepares for log-probabilities, offloads, or
          trains: gradients of earlier calls are silently freed or zeroed, and the step continues with the rest
          (its grad_norm halves, with two calls). A checkpoint saved there lacks them.
Upstream  NVIDIA-NeMo/RL#3660 added keep_train_buffers to prepare_for_lp_inference on main; nothing keeps callers
          from leaving it out, and the other methods have nothing like it.
Seam      the methods of the Megatron worker and of DTensor's: a MisuseError (a RuntimeError) that says what to do.
          prepare_for_lp_inference takes keep_train_buffers in releases that lack it, too.
Limits    use_reference_model, which main's own controller needs in an open step, is not refused: gradients stay,
          unless they share a buffer with the weights (MXFP8 with overlap_param_gather).
          DTensor's workers lose none when they offload, so only train() and save_checkpoint() are refused there.
Cost      one look at an attribute a call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..._python.dotted import temporarily_set
from ...errors import MisuseError
from ...patch import FIXED, NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, unmet
from .._ray_actors import actors_of
from ._workers import ACTOR, DTENSOR_WORKERS, MODULE, STATE, WORKER, is_open, names_in, no_worker, takes

LOGPROBS = "prepare_for_lp_inference"
ALWAYS = {"save_checkpoint": "would leave out", "train": "would zero"}
LOSING = {**ALWAYS, "offload_before_refit": "would free", "offload_after_refit": "would free"}
"""Methods, and what they do to the gradients of an open step. ALWAYS: in both workers; LOSING: in Megatron's."""
FIRST = "call finish_train_step() or abort_train_step() first"


def diagnose(module: ModuleType) -> Verdict:
    """Look at which of the real methods mention an open step."""
    return _verdict(module, ACTOR, (LOGPROBS, *LOSING), ("move_model",))


def diagnose_dtensor(module: ModuleType) -> Verdict:
    return _verdict(module, DTENSOR_WORKERS[module.__name__], tuple(ALWAYS), (LOGPROBS,))


def _verdict(module: ModuleType, actor: str, losing: tuple[str, ...], more: tuple[str, ...]) -> Verdict:
    worker = getattr(module, f"{actor}Impl", None)
    if worker is None:
        return no_worker(module, actor)
    expect_none(*unmet.attributes(f"{module.__name__}:{worker.__name__}", *losing, *more))
    unguarded = [name for name in losing if STATE not in names_in(worker, name)]
    if unguarded:
        return Verdict(NEEDED, f"not refused while a train step is open: {', '.join(unguarded)}")
    return Verdict(FIXED, "the worker refuses them itself")


def refusing(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def patched_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_open(self):
            raise MisuseError(f"{name}() {LOSING[name]} the gradients of the open train step: {FIRST}")
        return method(self, *args, **kwargs)

    return patched_method


def keeping_gradients(prepare_for_lp_inference: Callable[..., Any], frees: bool = True) -> Callable[..., Any]:
    knows = takes(prepare_for_lp_inference, "keep_train_buffers")

    def patched_prepare_for_lp_inference(
        self: Any, keep_train_buffers: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if frees and is_open(self) and not keep_train_buffers:
            raise MisuseError(
                f"{LOGPROBS}() would free the gradients of the open train step: "
                f"pass keep_train_buffers=True, or {FIRST}"
            )
        if knows:
            return prepare_for_lp_inference(self, keep_train_buffers, *args, **kwargs)
        with _freeing_nothing(self) if keep_train_buffers else contextlib.nullcontext():
            return prepare_for_lp_inference(self, *args, **kwargs)

    # Without __wrapped__, and without Ray's notes in __dict__: with them it would take the original's parameters.
    names = ("__module__", "__name__", "__qualname__", "__doc__")
    functools.update_wrapper(patched_prepare_for_lp_inference, prepare_for_lp_inference, names, updated=())
    del vars(patched_prepare_for_lp_inference)["__wrapped__"]
    return patched_prepare_for_lp_inference


def _freeing_nothing(worker: Any) -> contextlib.AbstractContextManager[None]:
    """Keep gradients and the optimizer's state off the CPU for now. (DTensor's workers have no move_model.)"""
    move_model = getattr(worker, "move_model", None)

    def to_gpu_alone(model: Any, device: str, *args: Any, **kwargs: Any) -> Any:
        return move_model(model, device, *args, **kwargs) if move_model and device == "cuda" else model

    return temporarily_set(worker, move_model=to_gpu_alone, offload_optimizer_for_logprob=False)


PATCH = Patch(
    name="nemo_rl.open-step-guard",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/3660",
    sites=(
        Site(
            MODULE,
            diagnose,
            replace={
                f"{WORKER}.{LOGPROBS}": keeping_gradients,
                **{f"{WORKER}.{name}": functools.partial(refusing, name) for name in LOSING},
            },
            rebuild=actors_of(WORKER),
        ),
        *(
            Site(
                module,
                diagnose_dtensor,
                replace={
                    f"{actor}Impl.{LOGPROBS}": functools.partial(keeping_gradients, frees=False),
                    **{f"{actor}Impl.{name}": functools.partial(refusing, name) for name in ALWAYS},
                },
                rebuild=actors_of(f"{actor}Impl"),
            )
            for module, actor in DTENSOR_WORKERS.items()
        ),
    ),
)
