"""verl's main_ppo in a real Ray, to the end of RayPPOTrainer.fit(), of verl 0.7.1 in VERL_RELEASES.

Two workers with the actor and the reference model, by verl's engines. Stand-ins: the CPU for GPUs, rollouts and
rewards, the engine's side of weight syncs, the logger, and Megatron's local layers for Transformer Engine's
(rigs/jobs/verl.py).
"""

import importlib
from importlib.util import find_spec

import pytest
from rigs.jobs import llama
from rigs.jobs.job import JOBS, TESTS, assert_same_training, both_ways
from rigs.verl.engine import RELEASES

RELEASE = next((each.folder for each in RELEASES if each.name == "verl-0.7.1"), None)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not RELEASE, reason="verl 0.7.1 is not in VERL_RELEASES"),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs what verl imports"),
]
REACH = "+ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=megapatch.activate"
FLAGS = """
    --config-name=ppo_megatron_trainer hydra.run.dir=. hydra.output_subdir=null
    trainer.use_legacy_worker_impl=disable trainer.n_gpus_per_node=2 trainer.val_before_train=false
    trainer.save_freq=-1 trainer.total_training_steps=3
    data.train_files=../model/prompts.parquet data.val_files=../model/prompts.parquet data.train_batch_size=4
    data.dataloader_num_workers=0 data.max_prompt_length=8 data.max_response_length=12 data.shuffle=false
    algorithm.adv_estimator=grpo critic.enable=false
    actor_rollout_ref.model.path=../model actor_rollout_ref.model.use_remove_padding=true
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.01
    actor_rollout_ref.actor.optim.lr=1e-2 actor_rollout_ref.actor.megatron.vanilla_mbridge=false
    actor_rollout_ref.actor.megatron.sequence_parallel=false
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rigs.jobs.verl.Rollouts
"""
FLAGS += "".join(
    f" +actor_rollout_ref.actor.megatron.override_transformer_config.{name}=false" for name in llama.FUSIONS
)


def test_three_steps(tmp_path):
    llama.write_model(tmp_path / "model")
    prompts = {"prompt": [[{"role": "user", "content": "w5"}]] * 16, "data_source": ["none"] * 16}
    importlib.import_module("pandas").DataFrame(prompts).to_parquet(tmp_path / "model/prompts.parquet")
    plain, patched = both_ways(tmp_path, JOBS / "verl_ppo.py", FLAGS, reach=REACH, paths=[RELEASE, TESTS])
    assert_same_training(plain, patched, 3, "verl.gathered-when-read")
    assert len(set(plain.lines("JOB weights"))) == 4
