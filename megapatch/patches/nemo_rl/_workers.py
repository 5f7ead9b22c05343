"""The names of NeMo-RL's workers, and ways to look at their methods."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...patch import FIXED, UNSUPPORTED, Verdict, unpatched
from .._diagnosis import codes_of, expect_none, gone
from .._ray_actors import class_of

MODULE = "nemo_rl.models.policy.workers.megatron_policy_worker"
FORKED = "nemo_rl.models.policy.megatron_policy_worker"
WORKER = "MegatronPolicyWorkerImpl"
ACTOR = "MegatronPolicyWorker"
DTENSOR_WORKERS = {
    "nemo_rl.models.policy.workers.dtensor_policy_worker": "DTensorPolicyWorker",
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2": "DTensorPolicyWorkerV2",
    "nemo_rl.models.policy.dtensor_policy_worker": "DTensorPolicyWorker",
    "nemo_rl.models.policy.dtensor_policy_worker_v2": "DTensorPolicyWorkerV2",
}
"""The name of the actor class, by module. Up to v0.4.0 the modules were elsewhere."""
TQ_MODULE = "nemo_rl.models.policy.tq_policy"
TWINS = ("context_parallel", "tensor_parallel", "pipeline_parallel")
"""Along these axes workers hold the same part of a batch."""
SPLIT_STEP = ("begin_train_step", "train_microbatch", "finish_train_step", "abort_train_step")
STATE = "_train_step_state"
"""Attribute of a worker: not None while a split train step is open, NeMo-RL main's own or ours."""


def split_step_of(worker: str, methods: str) -> dict[str, str]:
    """Return the four calls of a split train step, for a site to add to a worker class.

    Args:
        worker: the name of the class.
        methods: the module of `_split_step` with the first call, which differs by kind of worker.
    """
    shared = ("train_microbatch", "finish_train_step", "abort_train_step")
    return {**methods_of(worker, methods, "begin_train_step"), **methods_of(worker, "worker", *shared)}


def methods_of(cls: str, module: str, *names: str) -> dict[str, str]:
    """Return functions of a module of `_split_step`, by their names, for a site to add to a class."""
    return {f"{cls}.{name}": f"megapatch.patches.nemo_rl._split_step.{module}:{name}" for name in names}


def is_open(worker: Any) -> bool:
    return getattr(worker, STATE, None) is not None


def no_worker(module: ModuleType, actor: str = ACTOR) -> Verdict:
    """Return the verdict on a worker that is not as it is from v0.6.0 on."""
    if not _is_decorated(module, actor):
        return gone(f"{actor}Impl", module)
    trains = " and trains with a fork of Megatron" if actor == ACTOR else ""
    return Verdict(UNSUPPORTED, f"up to v0.5.0 {actor} is Ray's actor class itself{trains}")


def _is_decorated(module: ModuleType, actor: str) -> bool:
    """Whether the class that was made an actor has the methods itself, as up to v0.5.0; later it only inherits."""
    found = getattr(module, actor, None)
    cls = found if isinstance(found, type) or found is None else class_of(found)
    return cls is not None and any(not name.startswith("__") for name in vars(cls))


def has_own(cls: type, method: str) -> bool:
    """Whether the class has the method without us. Ours are functions of megapatch."""
    found = vars(cls).get(method)
    return found is not None and not unpatched(found).__module__.startswith("megapatch.")


def has_own_split_step(worker: type) -> bool:
    """Whether the worker has a split train step without us, or a part of one, as on main."""
    return any(has_own(worker, method) for method in SPLIT_STEP)


def settled_by_upstream(worker: type) -> Verdict | None:
    """Return the verdict where the worker has a split train step without us; None where it has none."""
    if not has_own_split_step(worker):
        return None
    expect_none(*(f"{worker.__name__}.{method}" for method in SPLIT_STEP if not has_own(worker, method)))
    return Verdict(FIXED, f"{worker.__name__} has begin_train_step")


def before_split_step(module: ModuleType) -> str:
    """Say why a release lacks a name that came with NeMo-RL's own split train step; "" if it has that."""
    worker = getattr(module, WORKER, None)
    if worker is None:
        return no_worker(module).reason if _is_decorated(module, ACTOR) else ""
    return "" if has_own_split_step(worker) else "it came with NeMo-RL's own split train step"


def names_in(owner: type | ModuleType, function: str) -> set[str]:
    """Return the attributes and globals that the code of a class's method or a module's function mentions.

    Looks into closures: that is where NeMo-RL's decorators keep the function, without a ``__wrapped__``.
    """
    return {name for code in codes_of(vars(owner).get(function)) for name in code.co_names}


def takes(method: Any, parameter: str) -> bool:
    """Whether the method, seen through such decorators, has a parameter of that name."""
    return any(
        parameter in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] for code in codes_of(method)
    )
