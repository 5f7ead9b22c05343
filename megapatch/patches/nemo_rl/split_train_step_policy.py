"""NeMo-RL's policies can split a train step over several calls.

Symptom   AttributeError: an asynchronous controller drives a Policy (a TQPolicy where there is a data plane), and
          these have only train(); nobody calls the methods that `nemo_rl.split-train-step` gives their workers.
Upstream  NVIDIA-NeMo/RL#2683, on main since 2026-07-07 for TQPolicy, never for Policy, and in no release up to
          v0.7.0; prepare_for_lp_inference(keep_train_buffers) is of #3660.
Seam      adds to both classes begin_train_step, finish_train_step and abort_train_step, and a method to train on
          part of the batch: train_microbatches(data) to Policy, which is to train_microbatches_from_meta(meta) as
          train() is to train_from_meta(); the data plane's workers get the entry points that main's TQPolicy
          calls. Metrics are of one worker for each data-parallel rank, by the worker group's own
          output_is_replicated, as in train(). prepare_for_lp_inference() passes keep_train_buffers on if it is
          true, where main does so itself.
Limits    v0.6.0, v0.7.0 and main. Unless sequences are packed or batched dynamically, the data of a call must have
          the same number of whole microbatches for each data-parallel rank. As on main, finish_train_step()
          returns no theoretical_tflops, and an exception closes only the step of the worker that raised it: call
          abort_train_step().
Cost      none where nobody calls these.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...patch import FIXED, NEEDED, UNSUPPORTED, Patch, Site, Verdict, unpatched
from .._diagnosis import expect_none, gone, unmet
from .._ray_actors import actors_of
from ._workers import TQ_MODULE, TWINS, has_own, methods_of

POLICY_MODULE = "nemo_rl.models.policy.lm_policy"
MIXIN_MODULE = "nemo_rl.data_plane.worker_mixin"
POLICY, TQ_POLICY, MIXIN = "Policy", "TQPolicy", "TQWorkerMixin"
OF_POLICY = (
    "cfg",
    "dynamic_batching_args",
    "flops_tracker",
    "sequence_packing_args",
    "sharding_annotations",
    "use_dynamic_batches",
    "use_sequence_packing",
    "worker_group",
)
STEP = ("begin_train_step", "finish_train_step", "abort_train_step")


def diagnose_policy(module: ModuleType) -> Verdict:
    """Look at the parameters of Policy.train(), and at the attributes that Policy.__init__() makes."""
    path = f"{module.__name__}:{POLICY}"
    found = _settled(module, POLICY, "begin_train_step")
    if found is not None:
        return found
    missing = unmet.parameters(f"{path}.train", "data", "loss_fn", "gbs", "mbs")
    if not missing and unmet.parameters(f"{path}.train", "timer"):
        return Verdict(UNSUPPORTED, "train() takes no timer: up to v0.5.0 NeMo-RL trains with a fork of Megatron")
    missing += unmet.names(f"{path}.__init__", *OF_POLICY)
    missing += [] if missing or _knows_twins(module) else [f"the axes {', '.join(TWINS)} in {path}.train"]
    missing += unmet.attributes(path, "prepare_for_lp_inference", "run_all_workers_single_data")
    missing += unmet.parameters(
        f"{module.__name__}:RayWorkerGroup.run_all_workers_sharded_data",
        "in_sharded_axes",
        "replicate_on_axes",
        "output_is_replicated",
        "common_kwargs",
    )
    expect_none(*missing)
    return Verdict(NEEDED, f"{POLICY} has only train()")


def diagnose_tq_policy(module: ModuleType) -> Verdict:
    """Look at TQPolicy, and at the calls of its train_from_meta()."""
    found = _settled(module, TQ_POLICY, "begin_train_step")
    if found is not None:
        return found
    path = f"{module.__name__}:{TQ_POLICY}"
    missing = unmet.names(f"{path}.__init__", "dp_client", "_router_replay_enabled")
    missing += unmet.attributes(path, "_stamp_pad_seqlen", "_packing_args")
    names = ("DP_TRAIN_FIELDS", "fields_with_optional_routed_experts")
    missing += unmet.attributes(f"{module.__name__}:", *names)
    missing += unmet.parameters(
        f"{module.__name__}:shard_meta_for_dp",
        "dp_world",
        "batch_size",
        "sequence_packing_args",
        "dynamic_batching_args",
    )
    expect_none(*missing)
    return Verdict(NEEDED, f"{TQ_POLICY} has only train_from_meta()")


def diagnose_mixin(module: ModuleType) -> Verdict:
    """Look at the calls of the worker's train_presharded()."""
    found = _settled(module, MIXIN, "begin_train_step_presharded")
    if found is not None:
        return found
    names = ("_fetch", "_attach_or_repack_pack_metadata", "_is_replica_leader")
    expect_none(*unmet.attributes(f"{module.__name__}:{MIXIN}", *names))
    return Verdict(NEEDED, f"{MIXIN} has only train_presharded()")


def _knows_twins(module: ModuleType) -> bool:
    """Whether train() drops the answers along the axes that we know, and along no others."""
    code = unpatched(getattr(module, POLICY).train).__code__
    return any(isinstance(constant, tuple) and set(constant) == set(TWINS) for constant in code.co_consts)


def _settled(module: ModuleType, name: str, method: str) -> Verdict | None:
    """Return the verdict if the class is missing, or has the method without us."""
    cls = getattr(module, name, None)
    if cls is None:
        return gone(name, module)
    if has_own(cls, method):
        return Verdict(FIXED, f"{name} has {method}")
    return None


def keeping_train_buffers(prepare_for_lp_inference: Callable[..., None]) -> Callable[..., None]:
    """Pass keep_train_buffers on to the workers, which the original never does before NeMo-RL main."""
    takes_it = "keep_train_buffers" in inspect.signature(prepare_for_lp_inference).parameters

    @functools.wraps(prepare_for_lp_inference)
    def patched_prepare_for_lp_inference(
        self: Any, keep_train_buffers: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        if takes_it:
            return prepare_for_lp_inference(self, keep_train_buffers, *args, **kwargs)
        if not keep_train_buffers:
            return prepare_for_lp_inference(self, *args, **kwargs)
        self.run_all_workers_single_data("prepare_for_lp_inference", keep_train_buffers=True)
        return None

    return patched_prepare_for_lp_inference


PATCH = Patch(
    name="nemo_rl.split-train-step-policy",
    doc=__doc__,
    upstream="https://github.com/NVIDIA-NeMo/RL/pull/2683",
    sites=(
        Site(
            POLICY_MODULE,
            diagnose_policy,
            replace={f"{POLICY}.prepare_for_lp_inference": keeping_train_buffers},
            add=methods_of(POLICY, "policy", *STEP, "train_microbatches"),
        ),
        Site(
            TQ_MODULE,
            diagnose_tq_policy,
            add=methods_of(TQ_POLICY, "policy", *STEP, "train_microbatches_from_meta"),
        ),
        Site(
            MIXIN_MODULE,
            diagnose_mixin,
            add=methods_of(MIXIN, "worker", *(f"{name}_presharded" for name in (*STEP, "train_microbatch"))),
            rebuild=actors_of(MIXIN),
        ),
    ),
)
