"""Megatron's pretrain() as pretrain_gpt.py calls it, by torchrun at 2 ranks: wheels have it from 0.17 on.

With MEGATRON_CHECKOUT the script is Megatron's own. It evaluates and saves in intervals of which no number of
steps is a multiple, is killed in a step, and resumes.

torch's FSDP2 trains and saves. Megatron ends its resumed run in load_checkpoint(), plain too: the state_dict() of
ChainedOptimizer takes no `is_loading`; and as torch_dist its optimizer cannot be saved. Megatron-FSDP was not run.
No RerunMode is named `report_stats`, from 0.17 to 0.19: here the rerun machine has injected errors.
"""

import re

import pytest
from rigs.jobs.flags import BOTH, DISTRIBUTED, FLAGS
from rigs.jobs.job import JOBS, assert_alike, beside, both_ways, differences, of_checkout
from rigs.jobs.job import run as run_once
from rigs.megatron.options import needs_training
from rigs.megatron.save import minor

from megapatch._engine.settings import SAME_NUMBERS
from megapatch.patches import PATCHES

pytestmark = needs_training
SCRIPT = of_checkout("pretrain_gpt.py") or JOBS / "pretrain_gpt.py"
MCORE = "--async-strategy mcore" if minor() > 16 else ""
SETTINGS = {
    "both overlaps": BOTH,
    "fp32": "",
    "bf16": f"--bf16 {DISTRIBUTED}",
    "fp16": f"--fp16 {DISTRIBUTED} --overlap-grad-reduce"
    " --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1",
    "TP 2": f"{BOTH} --tensor-model-parallel-size 2",
    "PP 2": f"{BOTH} --num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "EP 2": f"{BOTH} --num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    " --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01",
    "async save": f"{BOTH} --async-save --use-persistent-ckpt-worker {MCORE}",
    "constant structure": f"{BOTH} --ckpt-assume-constant-structure",
    "offload": f"{BOTH} --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer",
    "exit interval": f"{BOTH} --exit-interval 3",
    "rerun": f"{BOTH} --error-injection-rate 13 --error-injection-type correct_result",
}
FSDP2 = "--bf16 --use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format torch_dcp"
ENVIRONMENT = {"offload": {"JOB_PLACES": "1"}, "async save": {"JOB_WAITS": "1"}}
MEANT = ["rerun_state_machine"] if minor() < 18 else []
"""What differs in checkpoints on purpose: megatron.rerun-state-dict saves the state in each."""
ENDED_IN_ORDER = {"exit interval": 0, "rerun": 1}
"""What a first run ends with that no signal kills."""


def run(folder, setting, more="", **options):
    flags = f"{FLAGS} {SETTINGS[setting]} {more}"
    return both_ways(folder, SCRIPT, flags, env=options | ENVIRONMENT.get(setting, {}))


def steps(job):
    return [int(step) for step in re.findall(r"iteration +(\d+)/ ", "\n".join(job.printed["1/stdout.log"]))]


def test_a_straight_run(tmp_path):
    plain, patched = run(tmp_path, "both overlaps")
    assert plain.code == 0
    assert steps(plain) == [1, 2, 3, 4, 5]
    assert len(plain.printed["1/stdout.log"]) == 5 + 3  # evaluations
    assert "megatron.train-reentry" in patched.applied
    assert_alike(plain, patched, MEANT)


@pytest.mark.nightly
def test_a_straight_run_with_the_patches_that_keep_numbers(tmp_path):
    plain, patched = run(tmp_path, "both overlaps", MEGAPATCH_ONLY=SAME_NUMBERS)
    assert plain.code == 0
    assert "megatron.forward-pre-hook" in patched.applied
    assert not patched.applied & {patch.name for patch in PATCHES if patch.changes_numbers}
    assert_alike(plain, patched, MEANT)


@pytest.mark.nightly
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_that_is_killed_and_resumes(tmp_path, setting):
    killed = run(tmp_path, setting, JOB_AT="kill 4")
    assert [job.code for job in killed] == [ENDED_IN_ORDER.get(setting, 1)] * 2
    plain, patched = run(tmp_path, setting, "--load ck")
    if setting == "rerun":  # on the same machine Megatron asks to be started again, on another one
        assert (plain.code, steps(plain)) == (1, [])
    else:
        assert plain.code == 0
        assert steps(plain)[-1] == 5
        assert len(steps(plain)) < 5
    assert_alike(plain, patched, MEANT)


@pytest.mark.nightly
def test_steps_that_fp16_skips(tmp_path):
    plain, patched = run(tmp_path, "fp16")
    assert plain.code == 0
    (third,) = (line for line in plain.printed["1/stdout.log"] if re.search(r"iteration +3/ ", line))
    assert "number of skipped iterations:   1" in third
    assert_alike(plain, patched, MEANT)


@pytest.mark.nightly
def test_a_straight_run_with_fsdp2(tmp_path):
    """Up to 0.18 plain Megatron fails in the first step."""
    flags, env = f"{FLAGS} {FSDP2}", {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    plain, patched = both_ways(tmp_path, SCRIPT, flags, env=env)
    if minor() < 19:
        assert plain.code == 1
        assert any("'force_all_reduce'" in line for line in plain.printed["1/stderr.log"])
        only = {**env, "MEGAPATCH_ONLY": "megatron.torch-fsdp2-finalize,megatron.rerun-state-dict"}
        plain = run_once(tmp_path / "only", SCRIPT, flags, with_megapatch=True, env=only)
    assert plain.code == 0
    assert steps(plain) == [1, 2, 3, 4, 5]
    assert_alike(plain, patched)


@pytest.mark.nightly
def test_a_signal_ends_a_run_in_order(tmp_path):
    plain, patched = run(tmp_path, "both overlaps", "--exit-signal-handler", JOB_AT="SIGTERM 3")
    assert steps(plain) == [1, 2, 3]
    assert "ck/iter_0000003" in plain.saved
    assert_alike(plain, patched, MEANT)


@pytest.mark.nightly
def test_only_an_evaluation(tmp_path):
    run(tmp_path, "both overlaps")
    plain, patched = run(tmp_path, "both overlaps", "--load ck --skip-train")
    assert plain.code == 0
    assert steps(plain) == []
    assert len(plain.printed["1/stdout.log"]) == 2
    assert_alike(plain, patched, MEANT)


@pytest.mark.nightly
def test_its_main_twice_in_a_process(tmp_path):
    flags = f"main 3 {SCRIPT} {FLAGS} {BOTH} --load ck"
    plain, patched = both_ways(tmp_path, JOBS / "twice.py", flags)
    assert plain.code == 0
    assert steps(plain) == [1, 2, 3, 4, 5]
    assert_alike(plain, patched, MEANT)


@pytest.mark.nightly
def test_train_twice_is_one_longer_run(tmp_path):
    """Plain Megatron fails in its second call."""
    plain, patched = both_ways(tmp_path, JOBS / "twice.py", f"train 3 {SCRIPT} {FLAGS} {BOTH}")
    assert plain.code == 1
    assert steps(plain) == [1, 2, 3]
    longer = run_once(tmp_path / "longer", SCRIPT, f"{FLAGS} {BOTH}", with_megapatch=False)
    assert patched.code == longer.code == 0
    assert patched.saved == longer.saved
    assert without_losses(patched) == without_losses(longer)
    (found,) = differences([[job.folder / "ck/iter_0000005" for job in (longer, patched)]])
    begun = ("iteration", "num_floating_point_operations_so_far")  # with which the second call began
    assert [name.partition("/args/")[2] for name in beside(found, MEANT)] == [*begun]


def without_losses(job):
    """Return the lines without losses of steps: Megatron counts the first of each call in the next line again."""
    return [re.sub(r"(?<=iteration).*?/ +\d+ |lm loss: \S+", "", line) for line in job.printed["1/stdout.log"]]
