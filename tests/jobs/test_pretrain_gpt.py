"""Megatron's pretrain() as pretrain_gpt.py calls it, by torchrun at 2 ranks; wheels have it from 0.17 on.

It evaluates and saves in intervals of which no number of steps is a multiple, is killed in a step, and resumes.
"""

import pytest
from rigs.jobs.job import JOBS, assert_alike, both_ways
from rigs.megatron.options import needs_training

pytestmark = needs_training
SCRIPT = JOBS / "pretrain_gpt.py"
FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32
    --max-position-embeddings 32 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --transformer-impl local --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion
    --distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --seed 3
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2
    --clip-grad 1.0 --weight-decay 0.1 --log-interval 1 --eval-iters 2 --ckpt-format torch_dist
    --train-iters 5 --save-interval 2 --eval-interval 3 --save ck --load ck
"""
# Without the last, the padding of buckets is saved, which nobody has set.
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
BOTH = f"--bf16 {DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
SETTINGS = {
    "both overlaps": BOTH,
    "fp32": "",
    "bf16": f"--bf16 {DISTRIBUTED}",
    "fp16": f"--fp16 --initial-loss-scale 4194304 --hysteresis 1 {DISTRIBUTED} --overlap-grad-reduce",
    "TP 2": f"{BOTH} --tensor-model-parallel-size 2",
    "PP 2": f"{BOTH} --num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "EP 2": f"{BOTH} --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    " --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    "async save": f"{BOTH} --async-save --use-persistent-ckpt-worker",
    "constant structure": f"{BOTH} --ckpt-assume-constant-structure",
    "exit interval": f"{BOTH} --exit-interval 3",
    "offload": f"{BOTH} --optimizer-cpu-offload --use-precision-aware-optimizer",
    "FSDP2": "--bf16 --use-torch-fsdp2 --untie-embeddings-and-output-weights",
    "rerun": f"{BOTH} --rerun-mode report_determinism_stats",
}


def run(folder, setting, **options):
    return both_ways(folder, SCRIPT, f"{FLAGS} {SETTINGS[setting]}", **options)


def test_a_straight_run(tmp_path):
    plain, patched = run(tmp_path, "both overlaps")
    assert plain.code == 0
    assert len(plain.printed["1/stdout.log"]) == 5 + 3  # steps; evaluations
    assert "megatron.train-reentry" in patched.applied
    assert_alike(plain, patched)


@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=() if name == "both overlaps" else pytest.mark.nightly) for name in SETTINGS],
)
def test_a_run_that_is_killed_and_resumes(tmp_path, setting):
    killed = run(tmp_path, setting, env={"JOB_AT": "kill 4"})
    assert [job.code for job in killed] == [1, 1] if setting != "exit interval" else [0, 0]
    plain, patched = run(tmp_path, setting)
    assert plain.code == 0
    assert_alike(plain, patched)


@pytest.mark.nightly
def test_a_signal_ends_a_run_in_order(tmp_path):
    plain, patched = both_ways(
        tmp_path, SCRIPT, f"{FLAGS} {BOTH} --exit-signal-handler", env={"JOB_AT": "SIGTERM 3"}
    )
    assert_alike(plain, patched)


@pytest.mark.nightly
def test_only_an_evaluation(tmp_path):
    run(tmp_path, "both overlaps")
    plain, patched = both_ways(tmp_path, SCRIPT, f"{FLAGS} {BOTH} --skip-train")
    assert plain.code == 0
    assert_alike(plain, patched)
