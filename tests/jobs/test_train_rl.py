"""Megatron's GRPO loop, train_rl.py, by torchrun at 2 ranks, from a checkout with its newer form (0.19, main).

Its engine is a stand-in that computes the logits of the model that it was given.
"""

import pytest
from rigs.jobs.flags import BOTH, DISTRIBUTED, FLAGS
from rigs.jobs.job import JOBS, assert_alike, both_ways, differences, of_checkout, run

SCRIPT = of_checkout("train_rl.py")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        SCRIPT is None, reason="MEGATRON_CHECKOUT names no checkout of Megatron-LM: see tox -e jobs"
    ),
]
GRPO = """
    --perform-rl-step --grpo-prompts-per-step 4 --grpo-group-size 4 --grpo-iterations 1 --grpo-kl-beta 0.05
    --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 --calculate-per-token-loss --inference-max-seq-length 32
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --save-interval 4 --finetune
"""
SEPARATE = "--rl-inference-tensor-model-parallel-size 2"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Return the flags of the loop from a checkpoint of three steps."""
    folder = tmp_path_factory.mktemp("policy")
    environments = folder / "environments.yaml"
    environments.write_text("- {}")  # the rollouts are drawn
    made = run(
        folder,
        of_checkout("pretrain_gpt.py"),
        f"{FLAGS} {BOTH} --train-iters 3",
        with_megapatch=False,
    )
    assert made.code == 0
    return f"{FLAGS} {GRPO} --langrl-env-config {environments} --pretrained-checkpoint {folder / 'ck'}"


def loop(folder, policy, flags):
    plain, patched = both_ways(folder, JOBS / "train_rl.py", f"{SCRIPT} {policy} {flags}")
    assert plain.code == 0
    assert len([line for line in plain.printed["1/stdout.log"] if line.startswith("iteration")]) == 5
    return plain, patched


def logits(job):
    return [line for line in job.printed["1/stdout.log"] if line.startswith("JOB")]


@pytest.mark.parametrize(
    "setting",
    ["", "--rl-offload-optimizer-during-inference", "--pipeline-model-parallel-size 2"],
    ids=["both overlaps", "optimizer offload", "PP 2"],
)
def test_the_loop_ends_as_plain(tmp_path, policy, setting):
    plain, patched = loop(tmp_path, policy, f"{BOTH} {setting}")
    assert logits(plain)
    assert "megatron.gathered-when-read" in patched.applied
    assert_alike(plain, patched)


def test_a_separate_model_for_inference_gets_the_weights_of_each_step(tmp_path, policy):
    """megatron.gathered-when-read: plain its engine has stale ones."""
    plain, patched = loop(tmp_path, policy, f"{BOTH} {SEPARATE}")
    script = f"{SCRIPT} {policy} --bf16 {DISTRIBUTED} {SEPARATE}"
    reference = run(tmp_path / "no overlap", JOBS / "train_rl.py", script, with_megapatch=False)
    assert len(logits(reference)) == 3
    assert logits(reference) != logits(plain)
    assert reference.printed == patched.printed
    (found,) = differences([[job.folder / "ck/iter_0000005" for job in (reference, patched)]])
    assert all(name.startswith("/common_state/shard_0_1/0/args/overlap_") for name in found)
