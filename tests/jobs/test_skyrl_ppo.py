"""SkyRL's RayPPOTrainer.train() in a real Ray, of skyrl-train 0.3.1 in SKYRL_RELEASES.

Two policy workers and two of the reference model, on the same GPUs. Stand-ins: the CPU for GPUs, rollouts, the
engine, and Megatron's local layers for Transformer Engine's (rigs/jobs/skyrl.py).
"""

from importlib.util import find_spec

import pytest
from rigs.jobs import llama
from rigs.jobs.job import JOBS, TESTS, assert_alike, assert_same_training, both_ways
from rigs.megatron.save import minor
from rigs.skyrl.releases import RELEASES

RELEASE = next((each.folder for each in RELEASES if each.name == "skyrl_train-0.3.1"), None)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not RELEASE, reason="skyrl-train 0.3.1 is not in SKYRL_RELEASES"),
    pytest.mark.skipif(find_spec("loguru") is None, reason="needs what skyrl-train imports"),
    pytest.mark.skipif(minor() > 18, reason="imports what Megatron has up to 0.18: see tox -e jobs-skyrl"),
]
FLAGS = """
    trainer.strategy=megatron trainer.placement.colocate_all=false trainer.policy.model.path=../model
    trainer.placement.policy_num_gpus_per_node=2 trainer.placement.ref_num_gpus_per_node=2
    trainer.logger=console trainer.ckpt_path=ck trainer.export_path=ck trainer.ckpt_interval=-1
    trainer.hf_save_interval=100
    trainer.train_batch_size=4 trainer.policy_mini_batch_size=2 trainer.critic_mini_batch_size=2
    trainer.micro_train_batch_size_per_gpu=2 trainer.micro_forward_batch_size_per_gpu=2
    trainer.eval_interval=-1 trainer.eval_before_train=false trainer.flash_attn=false
    trainer.gradient_checkpointing=false trainer.algorithm.kl_loss_coef=0.01
    trainer.policy.optimizer_config.lr=1e-2
    generator.run_engines_locally=false generator.n_samples_per_prompt=4
    generator.inference_engine_tensor_parallel_size=1
"""
FLAGS += "".join(
    f" +trainer.{role}.megatron_config.transformer_config_kwargs.{name}=false"
    for role in ("policy", "ref")
    for name in llama.FUSIONS
)
OVERLAP = """
    trainer.policy.megatron_config.ddp_config.overlap_grad_reduce=true
    trainer.policy.megatron_config.ddp_config.overlap_param_gather=true
    +trainer.policy.megatron_config.optimizer_config_kwargs.overlap_param_gather=true
"""
REACH = "--with-megapatch"


def train(folder, *flags):
    llama.write_model(folder / "model")
    return both_ways(folder, JOBS / "skyrl_ppo.py", " ".join([FLAGS, *flags]), reach=REACH, paths=[RELEASE, TESTS])


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return train(tmp_path_factory.mktemp("straight"))


def test_three_steps(straight):
    assert_same_training(*straight, 3, "skyrl.gathered-when-read")
    assert len(set(straight[0].lines("JOB weights"))) == 4


def test_both_overlaps(tmp_path, straight):
    """megatron.gathered-when-read: plain the engine's weights and the export are partly those before the step."""
    plain, patched = train(tmp_path, OVERLAP)
    assert plain.code == 0
    assert plain.lines("JOB step") == straight[0].lines("JOB step")
    sent = [set(job.lines("JOB weights")) for job in (plain, straight[0])]
    assert len(sent[0] & sent[1]) == 1  # before the first step
    assert_alike(straight[0], patched)
