"""slime's train.py in a real Ray: two training actors, a reference model, rollouts from disk, saves.

Three rollouts of two steps each; every second is saved, and the last.

SLIME_CHECKOUT names slime, and MEGATRON_CHECKOUT the Megatron of its image, with slime's patch. The CPU takes the
place of GPUs; the model's attention, and what cannot be installed, have stand-ins (rigs/jobs/slime.py, on_cpu.py).
"""

import pytest
from rigs.jobs import llama, slime
from rigs.jobs.job import JOBS, TESTS, assert_alike, differences, of_checkout, run
from rigs.variables import folder_in

CHECKOUT, OF_MEGATRON = folder_in("SLIME_CHECKOUT"), of_checkout("megatron/training/training.py")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHECKOUT, reason="SLIME_CHECKOUT is not set"),
    pytest.mark.skipif(
        OF_MEGATRON is None or "disable_param_buffers_cpu_backup" not in OF_MEGATRON.read_text(),
        reason="MEGATRON_CHECKOUT names no Megatron with slime's patch",
    ),
]
REACH = """
    --custom-megatron-init-path megapatch.activate
    --custom-megatron-before-train-step-hook-path megapatch.check
"""
MODEL = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5
    --position-embedding-type rope --vocab-size 128 --make-vocab-size-divisible-by 1
    --untie-embeddings-and-output-weights --transformer-impl local --attention-dropout 0 --hidden-dropout 0
    --no-rope-fusion --no-bias-swiglu-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --bf16 --distributed-backend gloo --ckpt-format torch_dist --micro-batch-size 1
    --seed 3 --lr 1e-2
"""
ONE_STEP = """
    --seq-length 128 --max-position-embeddings 128 --tokenizer-type NullTokenizer --train-iters 1 --save-interval 1
    --save ck
"""
FLAGS = f"""{MODEL}
    --custom-model-provider-path rigs.jobs.slime.model_provider --attention-backend unfused
    --actor-num-nodes 1 --actor-num-gpus-per-node 2 --num-gpus-per-node 3
    --ref-load ../reference/ck --load ck --save ck --save-interval 2 --hf-checkpoint ../tokenizer
    --prompt-data ../rollouts/prompts.jsonl
    --input-key prompt --label-key label --rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 4
    --num-rollout 3 --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl
    --lr-decay-style constant --weight-decay 0.1 --optimizer adam --accumulate-allreduce-grads-in-fp32
    --dist-ckpt-optim-fully-reshardable
"""
NO_ENGINE = "--debug-train-only --load-debug-rollout-data ../rollouts/{rollout_id}.pt"
ENGINE = """
    --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1
    --rollout-function-path slime.rollout.forge_load.generate_rollout
    --load-forge-rollout-data ../rollouts/{rollout_id}.pt
"""
BOTH = "--overlap-grad-reduce --overlap-param-gather"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a reference model, rollouts and a tokenizer."""
    folder = tmp_path_factory.mktemp("slime")
    reference = run(
        folder / "reference",
        JOBS / "slime_reference.py",
        f"{MODEL} {ONE_STEP}",
        with_megapatch=False,
        ranks=1,
    )
    assert reference.code == 0
    slime.write_rollouts(folder / "rollouts", 3)
    llama.write_tokenizer(folder / "tokenizer")
    return folder


def train(folder, setting, *flags, which=("plain", "patched"), **env):
    """Return how the jobs end, which are each in a folder of its own below that of the reference model."""
    return [
        run(
            folder / f"{setting}-{name}",
            JOBS / "slime_train.py",
            " ".join([FLAGS, *flags]),
            with_megapatch=name == "patched",
            reach=REACH,
            paths=[CHECKOUT, TESTS],
            env=env,
        )
        for name in which
    ]


@pytest.fixture(scope="module")
def straight(folder):
    return train(folder, "straight", NO_ENGINE)


def test_a_straight_run(straight):
    plain, patched = straight
    assert plain.code == 0
    assert len(plain.lines("step")) == 6
    assert len([name for name in plain.saved if name.endswith("metadata.json")]) == 2
    assert "slime.train-reentry" in patched.applied
    assert_alike(plain, patched)


def test_both_overlaps(folder, straight):
    """slime.train-reentry and megatron.forward-pre-hook: plain dies in its second rollout (slime#1779)."""
    plain, patched = train(folder, "both", NO_ENGINE, BOTH)
    assert plain.code == 1
    assert len(plain.lines("step")) == 2
    assert any("config.no_sync_func must be None" in line for line in plain.printed["all"])
    assert patched.code == 0
    assert patched.printed == straight[0].printed
    names = [name for name in patched.saved if name.endswith("metadata.json")]
    assert patched.saved == straight[0].saved
    found = differences([[(job.folder / name).parent for job in (straight[0], patched)] for name in names])
    assert all("/args/overlap_" in name for names in found for name in names), found


def test_a_job_that_is_killed_and_resumes(folder):
    """slime.first-sync-pushes-actor: plain its engine's first weights are the reference model's (slime#2224)."""
    killed = train(folder, "resumed", ENGINE, JOB_AT="kill 5")
    assert [job.code for job in killed] == [1, 1]
    before = [weights(job) for job in killed]
    assert before[0] == before[1]
    reference, first, second = before[0]
    assert len({reference, first, second}) == 3
    plain, patched = train(folder, "resumed", ENGINE)
    assert plain.code == 0
    assert len(plain.lines("step")) == 2
    assert weights(plain) == [reference, weights(patched)[1]]
    assert weights(patched)[0] == second
    for job in (plain, patched):
        job.printed["all"].remove(job.lines("JOB weights")[0])
    assert_alike(plain, patched)


def test_offload(folder):
    plain, patched = train(folder, "offload", NO_ENGINE, "--offload-train")
    assert plain.code == 0
    assert len(plain.lines("step")) == 6
    assert_alike(plain, patched)


def weights(job):
    """Return of each sync the sums of the weights that the engine had then."""
    return [line.partition(": ")[2] for line in job.lines("JOB weights")]
