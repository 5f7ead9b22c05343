"""NeMo-RL's grpo_train() with its Policy, its cluster and two of its Megatron workers, in a local Ray.

nemo_rl_grpo.py [--with-megapatch]. Rollouts, the engine's side of a refit and the logger are ours. JOB_FAIL=N has
the loss raise in each worker's N-th call of it; the driver then begins again with the step that failed. It prints
the metrics of each step.
"""

import functools
import os
import random
import sys
from types import SimpleNamespace

if "--with-megapatch" in sys.argv:
    from megapatch.reach.ray import compose_into_init

    compose_into_init()  # as docs/reach.md has it
import torch
from nemo_rl.algorithms import grpo
from nemo_rl.algorithms.loss import loss_functions
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.policy import lm_policy
from rigs.jobs import nemo_rl as workers
from rigs.jobs.edge import draw_rollouts, print_metrics
from rigs.jobs.local_ray import local_ray
from rigs.jobs.nemo_rl import LENGTH, VOCABULARY

STEPS, PROMPTS, OFF = 4, 4, {"enabled": False}
LOSS = {
    "reference_policy_kl_penalty": 0.1,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": 3.0,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": None,
    "token_level_loss": True,
}
POLICY = {
    "model_name": "tiny",
    "tokenizer": {"name": "tiny"},
    "generation": {"colocated": {"enabled": True}, "backend": "vllm"},
    "train_global_batch_size": 16,
    "train_micro_batch_size": 2,
    "logprob_batch_size": 2,
    "max_total_sequence_length": LENGTH,
    "precision": "float32",
    "sequence_packing": OFF,
    "dynamic_batching": OFF,
    "draft": OFF,
    "router_replay": OFF,
    "make_sequence_length_divisible_by": 1,
    "megatron_cfg": {
        "enabled": True,
        "env_vars": {},
        "empty_unused_memory_level": 0,
        "moe_per_layer_logging": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "optimizer": {"use_distributed_optimizer": True},
        "distributed_data_parallel_config": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    },
}
GRPO = {
    "num_prompts_per_step": PROMPTS,
    "num_generations_per_prompt": 4,
    "max_rollout_turns": 1,
    "max_num_epochs": 1,
    "max_num_steps": STEPS,
    "normalize_rewards": True,
    "use_leave_one_out_baseline": True,
    "val_period": 0,
    "val_at_start": False,
    "val_at_end": False,
    "overlong_filtering": False,
    "advantage_clip_low": None,
    "advantage_clip_high": None,
    "seed": 42,
    "use_dynamic_sampling": False,
    "dynamic_sampling_max_gen_batches": 10,
    "batch_multiplier": 1,
    "reward_shaping": OFF,
    "reward_scaling": OFF,
    "adv_estimator": {
        "name": "grpo",
        "normalize_rewards": True,
        "use_leave_one_out_baseline": True,
        "minus_baseline": True,
    },
    "seq_logprob_error_threshold": None,
    "skip_reference_policy_logprobs_calculation": False,
}


class Failing(loss_functions.ClippedPGLossFn):
    """A loss that raises once in a worker, which gets a new one for each step."""

    def __call__(self, *args, **kwargs):
        if next(workers.loss_calls) == self.fails_at:
            raise ConnectionError("a loss that fails")
        return super().__call__(*args, **kwargs)


class Tokenizer:
    pad_token_id, pad_token = 0, "x"


class Generation:
    """An engine that has nothing to prepare; what it would generate is drawn by step."""

    requires_kv_scale_sync = False
    step = 0

    def __getattr__(self, name):
        return lambda *args, **kwargs: {} if name.startswith("get") else True

    def roll_out(self, policy_generation, input_batch, *args, **kwargs):
        logs = input_batch["message_log"]
        _, answers, rewards = zip(*draw_rollouts(self.step, len(logs), VOCABULARY), strict=True)
        self.step += 1
        for log, tokens in zip(logs, answers, strict=True):
            answer = {"role": "assistant", "content": "y", "token_ids": torch.tensor(tokens)}
            log.append({**answer, "generation_logprobs": -4.1 + 0.003 * answer["token_ids"]})
        input_batch["total_reward"] = torch.tensor(rewards)
        input_batch["truncated"] = torch.zeros(len(logs), dtype=torch.bool)
        return input_batch, {"mean_gen_tokens_per_sample": 6.0}


class Prompts:
    def __init__(self, skip):
        self.skip = skip

    def __len__(self):
        return 100

    def __iter__(self):
        draw = random.Random(7)
        for number in range(100):
            prompts = [torch.tensor([draw.randint(1, VOCABULARY - 1) for _ in range(4)]) for _ in range(PROMPTS)]
            if number >= self.skip:
                yield BatchedDataDict(
                    message_log=[[{"role": "user", "content": "x", "token_ids": each}] for each in prompts],
                    length=torch.tensor([4] * PROMPTS),
                    loss_multiplier=torch.ones(PROMPTS),
                    extra_env_info=[{}] * PROMPTS,
                    task_name=["t"] * PROMPTS,
                    idx=list(range(PROMPTS)),
                )

    def state_dict(self):
        return {}


class Log:
    done = 0

    def log_metrics(self, metrics, step, prefix="", **ignored):
        if prefix == "train" and "loss" in metrics:
            self.done = step
            print_metrics(step, metrics)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def refit(policy, generation, colocated, **ignored):
    policy.offload_before_refit()
    policy.offload_after_refit()


def main():
    grpo.refit_policy_generation = refit
    generation, log = Generation(), Log()
    grpo.run_multi_turn_rollout = generation.roll_out
    grpo._should_use_async_rollouts = lambda config: False
    grpo.MemoryTracker = lambda: SimpleNamespace(snapshot_start_of_stage=lambda *args: None)
    grpo.print_performance_metrics = lambda *args, **kwargs: {}
    lm_policy.get_default_hf_config = _no_hub
    cluster = RayVirtualCluster(
        [2], use_gpus=True, max_colocated_worker_groups=1, num_gpus_per_node=2, name="train"
    )
    policy = lm_policy.Policy(cluster, POLICY, Tokenizer(), init_reference_model=True)
    of_loss = loss_functions.ClippedPGLossConfig(**LOSS)
    loss = Failing(of_loss)
    loss.fails_at = int(os.environ.get("JOB_FAIL", 0))
    settings = SimpleNamespace(
        policy=POLICY,
        grpo=GRPO,
        loss_fn=of_loss,
        checkpointing={"enabled": False, "save_period": 100, "checkpoint_must_save_by": None, "metric_name": None},
        data={"use_multiple_dataloader": False},
        cluster={"num_nodes": 1, "gpus_per_node": 2},
        logger={"wandb_enabled": False},
        env={},
        on_policy_distillation=None,
        data_plane=None,
    )
    train = functools.partial(_train, policy, generation, loss, log, settings)
    try:
        train(0)
    except ConnectionError:
        train(log.done)
    policy.shutdown()


def _train(policy, generation, loss, log, settings, done):
    """Call grpo_train() from this step on."""
    generation.step = done
    state = {"current_step": done, "total_steps": done, "current_epoch": 0, "consumed_samples": 0}
    state["total_valid_tokens"] = 0
    given = policy, generation, Prompts(done), None, Tokenizer(), loss, {}, {}, log, SimpleNamespace()
    grpo.grpo_train(*given, state, settings)


def _no_hub(*ignored, **also_ignored):
    raise ValueError("no hub here")


if __name__ == "__main__":
    with local_ray():
        main()
