"""An imitation of NeMo-RL's module of this name: the driver's side of a policy."""

from __future__ import annotations

from collections import defaultdict

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.worker_groups import RayWorkerGroup, wait


class Policy:
    def __init__(self, worker_group, config, flops_tracker, dynamic_batching_args, sequence_packing_args):
        """Not called: it tells what a policy has, which the rig makes."""
        self.worker_group: RayWorkerGroup = worker_group
        self.cfg, self.flops_tracker = config, flops_tracker
        self.sharding_annotations = worker_group.sharding_annotations
        self.use_dynamic_batches = config["dynamic_batching"]["enabled"]
        self.dynamic_batching_args = dynamic_batching_args
        self.use_sequence_packing = config["sequence_packing"]["enabled"]
        self.sequence_packing_args = sequence_packing_args

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None, timer=None):
        gbs, mbs = gbs or self.cfg["train_global_batch_size"], mbs or self.cfg["train_micro_batch_size"]
        shards = self._sharded(data, gbs, "train_mb_tokens")
        self.flops_tracker.reset()
        for one in shards:
            self.flops_tracker.track_batch(one["input_lengths"].tolist())
        futures = self.worker_group.run_all_workers_sharded_data(
            "train",
            data=shards,
            in_sharded_axes=["data_parallel"],
            replicate_on_axes=["context_parallel", "tensor_parallel", "pipeline_parallel"],
            output_is_replicated=["context_parallel", "tensor_parallel", "pipeline_parallel"],
            common_kwargs={"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": gbs, "mbs": mbs},
        )
        answers = self.worker_group.get_all_worker_results(futures)
        all_mb_metrics = defaultdict(list)
        for one in answers:
            for name, values in one["all_mb_metrics"].items():
                all_mb_metrics[name] += values
        return {
            "loss": answers[0]["global_loss"],
            "grad_norm": answers[0]["grad_norm"],
            "total_flops": self.flops_tracker.total_flops,
            "num_ranks": self.worker_group.cluster.world_size(),
            "all_mb_metrics": dict(all_mb_metrics),
        }

    def get_logprobs(self, data, timer=None):
        futures = self.worker_group.run_all_workers_sharded_data(
            "get_logprobs",
            data=self._sharded(data, None, "logprob_mb_tokens"),
            in_sharded_axes=["data_parallel"],
            replicate_on_axes=["context_parallel", "tensor_parallel", "pipeline_parallel"],
            output_is_replicated=["context_parallel", "tensor_parallel", "pipeline_parallel"],
        )
        return BatchedDataDict.from_batches(self.worker_group.get_all_worker_results(futures))

    def _sharded(self, data, size, tokens):
        ranks = self.sharding_annotations.get_axis_size("data_parallel")
        if self.use_dynamic_batches:
            kind, arguments = "dynamic_batching", self.dynamic_batching_args
        elif self.use_sequence_packing:
            kind, arguments = "sequence_packing", self.sequence_packing_args
        else:
            return data.shard_by_batch_size(ranks, batch_size=size)
        arguments["max_tokens_per_microbatch"] = self.cfg[kind][tokens]
        shards, _ = data.shard_by_batch_size(ranks, batch_size=size, **{f"{kind}_args": arguments})
        return shards

    def prepare_for_training(self, *args, **kwargs):
        self.run_all_workers_single_data("prepare_for_training")

    def prepare_for_lp_inference(self, *args, **kwargs):
        self.run_all_workers_single_data("prepare_for_lp_inference")

    def run_all_workers_single_data(self, method_name, *args, **kwargs):
        return wait(self.worker_group.run_all_workers_single_data(method_name, *args, **kwargs))
