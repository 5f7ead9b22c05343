"""NeMo-RL's Megatron worker can split a train step over several calls.

Symptom   AttributeError: an asynchronous controller that trains on rollouts as they arrive calls begin_train_step,
          train_microbatch, finish_train_step and abort_train_step, which no release has.
Upstream  NVIDIA-NeMo/RL#2683, on main since 2026-07-07 and in no release up to v0.7.0.
Seam      adds the four to MegatronPolicyWorkerImpl, built from `TrainStep` and the worker module's own functions,
          with main's signatures and the keys that main returns. train() is untouched. Then the actor class is
          rebuilt: Ray has captured the class, and does not see methods that came later.
Limits    v0.6.0 and v0.7.0; before, NeMo-RL trains with a fork of Megatron. Refused: router replay, multi-token
          prediction, and a loss by sequences in a model with a router's losses, which are divided by tokens (in
          v0.6.0's train() by nothing). The metric is_oob_ratio is left out. A step in which nothing counts on any
          rank leaves parameters as they are. After an exception the step is over: abort_train_step() does nothing
          then.
Cost      one all-reduce of two counts and one of a number a step, at its end.
"""

from __future__ import annotations

from types import ModuleType

from ...patch import NEEDED, Patch, Site, Verdict
from .._diagnosis import expect_none, unmet
from .._ray_actors import actors_of
from ._workers import ACTOR, FORKED, MODULE, WORKER, no_worker, settled_by_upstream, split_step_of

CALLED = (
    "aggregate_training_statistics",
    "broadcast_loss_metrics_from_last_stage",
    "get_microbatch_iterator",
    "get_moe_metrics",
    "get_rerun_state_machine",
    "megatron_forward_backward",
    "LossPostProcessor",
    "parallel_state",
)


def diagnose(module: ModuleType) -> Verdict:
    """Look at the class, and at its module for the names that train() calls."""
    worker = getattr(module, WORKER, None)
    if worker is None:
        return no_worker(module)
    if (settled := settled_by_upstream(worker)) is not None:
        return settled
    expect_none(*unmet.attributes(f"{module.__name__}:", ACTOR, *CALLED))
    return Verdict(NEEDED, f"{WORKER} has only train()")


PATCH = Patch(
    name="nemo_rl.split-train-step",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/2683",
    sites=(
        Site(MODULE, diagnose, add=split_step_of(WORKER, "megatron"), rebuild=actors_of(WORKER)),
        Site(FORKED, diagnose),
    ),
)
