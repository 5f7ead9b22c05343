"""The driver's part of a split train step, with the names of NeMo-RL main.

Policy gets data, TQPolicy the keys of samples in the data plane. All workers are called. Those that hold the same
data (tensor, pipeline and context parallel twins) give the same answer: as in train(), the worker group keeps one
answer for each data-parallel rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

from .._workers import TQ_MODULE, TWINS

DATA = "data_parallel"


def begin_train_step(self: Any, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
    """Open a step on every worker, to whose gradient calls add until finish_train_step().

    After an exception, here or in a later call, abort_train_step() closes the steps of the other workers.

    Args:
        loss_fn: as for train().
        gbs: samples of the step, over all ranks; by default the policy's setting.
        mbs: samples of a microbatch; by default the policy's setting.
    """
    arguments = {
        "loss_fn": loss_fn,
        "gbs": gbs or self.cfg["train_global_batch_size"],
        "mbs": mbs or self.cfg["train_micro_batch_size"],
    }
    _call_workers(self, _worker_method(self, "begin_train_step"), common_kwargs=arguments)
    if self.flops_tracker is not None:
        self.flops_tracker.reset()


def train_microbatches(self: Any, data: Any, timer: Any = None) -> None:
    """Run forward and backward on part of the step's data.

    It is sharded over data parallel as train() shards a batch, and each rank makes any number of microbatches of
    it.

    Args:
        data: as for train().
        timer: as for train().
    """
    with _timed(timer, "policy_training/sharding_data"):
        shards = _sharded(self, data)
    _track(self, [shard["input_lengths"].tolist() for shard in shards])
    _call_workers(self, "train_microbatch", timer, data=shards)


def train_microbatches_from_meta(self: Any, meta: Any, timer: Any = None) -> None:
    """Run forward and backward on samples that workers fetch from the data plane; as train_microbatches()."""
    nemo = sys.modules[TQ_MODULE]
    self._stamp_pad_seqlen(meta)
    packing, dynamic = self._packing_args("train_mb_tokens")
    fields = nemo.fields_with_optional_routed_experts(nemo.DP_TRAIN_FIELDS, enabled=self._router_replay_enabled)
    with _timed(timer, "policy_training/shard_meta"):
        metas, _ = nemo.shard_meta_for_dp(
            dataclasses.replace(meta, fields=fields, task_name="train"),
            dp_world=self.sharding_annotations.get_axis_size(DATA),
            batch_size=None,
            sequence_packing_args=packing,
            dynamic_batching_args=dynamic,
        )
    _track(self, [list(shard.sequence_lengths) for shard in metas])
    _call_workers(self, "train_microbatch_presharded", timer, meta=metas)


def finish_train_step(self: Any) -> dict[str, Any]:
    """Step the optimizer, and return the result of train() for the data of all calls in one batch."""
    answers = _call_workers(self, _worker_method(self, "finish_train_step"))
    result = {"loss": answers[0]["global_loss"], "grad_norm": answers[0]["grad_norm"]}
    if "moe_metrics" in answers[0]:
        result["moe_metrics"] = answers[0]["moe_metrics"]
    metrics: dict[str, list[Any]] = {}
    for answer in answers:
        for name, values in answer["all_mb_metrics"].items():
            metrics.setdefault(name, []).extend(values)
    result["all_mb_metrics"] = metrics
    if self.flops_tracker is not None:
        result["total_flops"] = self.flops_tracker.total_flops
        result["num_ranks"] = self.worker_group.cluster.world_size()
    return result


def abort_train_step(self: Any) -> None:
    """Drop the open step on every worker and zero the gradients. Does nothing if no step is open."""
    _call_workers(self, _worker_method(self, "abort_train_step"))
    if self.flops_tracker is not None:
        self.flops_tracker.reset()


# ---------------------------------------------------------------------------- helpers
def _call_workers(policy: Any, method: str, timer: Any = None, **arguments: Any) -> list[Any]:
    """Call all workers, wait for them, and return one answer for each data-parallel rank.

    An exception of a worker is re-raised here. Arguments are lists with an item for each data-parallel rank, and
    common_kwargs, which all workers get.
    """
    group = policy.worker_group
    with _timed(timer, "policy_training/submit_microbatch_futures"):
        futures = group.run_all_workers_sharded_data(
            method,
            in_sharded_axes=[DATA],
            replicate_on_axes=list(TWINS),
            output_is_replicated=list(TWINS),
            **arguments,
        )
    found: list[Any] = group.get_all_worker_results(futures)
    return found


def _worker_method(policy: Any, method: str) -> str:
    """Return the name by which workers are called: those of a TQPolicy have entry points of their own."""
    return f"{method}_presharded" if hasattr(policy, "dp_client") else method


def _sharded(policy: Any, data: Any) -> list[Any]:
    ranks = policy.sharding_annotations.get_axis_size(DATA)
    switches = {"dynamic_batching": "use_dynamic_batches", "sequence_packing": "use_sequence_packing"}
    for section, switch in switches.items():
        if getattr(policy, switch):
            name = f"{section}_args"
            most = {"max_tokens_per_microbatch": policy.cfg[section]["train_mb_tokens"]}
            shards, _ = data.shard_by_batch_size(ranks, **{name: {**getattr(policy, name), **most}})
            return list(shards)
    return list(data.shard_by_batch_size(ranks))


def _track(policy: Any, lengths: list[list[int]]) -> None:
    if policy.flops_tracker is not None:
        for of_shard in lengths:
            policy.flops_tracker.track_batch(of_shard)


def _timed(timer: Any, label: str) -> contextlib.AbstractContextManager[Any]:
    measured: contextlib.AbstractContextManager[Any] = timer.time(label) if timer else contextlib.nullcontext()
    return measured
