"""megatron.rerun-transient-fault on the real rerun state machine and in Megatron's own train(), at 2 ranks."""

import importlib
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rigs.cells import run_cells
from rigs.diagnosed_sources import verdict_of
from rigs.megatron.options import (
    ADAM,
    assert_same,
    attempt,
    iterate,
    needs_training,
    new_machine,
    plain_steps,
    quick_writer,
    rerun,
    rerun_data,
)

from megapatch.patches.megatron.rerun_transient_fault import diagnose
from megapatch.testing import MegatronLoop, init_parallel, megatron_training_available, run_ranks, tiny_gpt

WITHOUT = {"MEGAPATCH_DISABLE": "megatron.rerun-transient-fault"}
SCHEDULER = SimpleNamespace(step=lambda increment: None, state_dict=dict, load_state_dict=lambda state: None)
FAILED, TO_BE_RESUMED = 17, 16  # exit codes
SAVED, INTERRUPTED = 2, 3  # steps done


def found_by_rank(rank, world_size, folder):
    init_parallel()
    yield "as it is", lambda: verdict_of(diagnose, rerun()).kind.value
    yield "transient", partial(machine_after, rank, "VALIDATE_RESULTS", faulty_runs=1)
    yield "lasting", partial(machine_after, rank, "VALIDATE_RESULTS", faulty_runs=2)
    yield "none", partial(machine_after, rank, "VALIDATE_RESULTS", faulty_runs=0)
    yield "disabled", partial(machine_after, rank, "DISABLED", faulty_runs=0)
    if megatron_training_available():
        yield "trained", partial(trained, rank, folder)


def machine_after(rank, mode, faulty_runs):
    """Return a machine's answer after a step that is NaN on rank 1 in this many runs; and the error of another
    machine that continues with what a checkpoint would hold then."""
    machine, data = new_machine(mode), rerun_data(rank)
    iterate(machine, data)  # nothing is validated in the first one
    runs = 0
    while machine.should_run_forward_backward(data):
        runs += 1
        number = float("nan") if rank == 1 and runs <= faulty_runs else 1.0
        result = torch.tensor(number * next(data))
        machine.validate_result(result, rejection_func=torch.isnan, message="NaN", fatal=True)
    answer = machine.should_checkpoint_and_exit()
    if machine.state.name == "NOT_RUNNING_YET":
        return answer, None
    state = machine.state_dict(data, "torch_dist")
    state["sharded"] = state["sharded"].data
    resumed = new_machine(mode)
    resumed.load_state_dict(state)
    return answer, attempt(resumed.should_run_forward_backward, rerun_data(rank))[0]


class NotANumber:
    """Makes the model's next loss NaN when it is told to."""

    next_one = False

    def __init__(self, model):
        model.chunks[0].module.register_forward_hook(self)

    def __call__(self, module, inputs, losses):
        faulty, self.next_one = self.next_one, False
        return losses * float("nan") if faulty else losses


def loop_in(folder):
    flags = ["--save", folder, "--load", folder, "--save-interval", "100"]
    return MegatronLoop(tiny_gpt(layers=4, hooks=False, **ADAM), rerun_mode="validate_results", flags=flags)


def trained(rank, folder):
    """A job with a fault on rank 1 that does not come back, and the job that goes on from its last checkpoint."""
    quick_writer()
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    loop = loop_in(folder)
    nan = NotANumber(loop.model)
    loop.train(SAVED)
    checkpointing.save_checkpoint(
        SAVED,
        loop.model.chunks,
        loop.model.optimizer,
        SCHEDULER,
        0,
        checkpointing_context=loop.checkpointing_context,
        train_data_iterator=iter(()),
    )
    loop.train(1)
    nan.next_one = rank == 1
    ended = attempt(loop.train, 1)
    saved = sorted(name for name in os.listdir(folder) if name.startswith("iter_"))

    loop = loop_in(folder)
    loop.iteration, _ = checkpointing.load_checkpoint(loop.model.chunks, loop.model.optimizer, SCHEDULER)
    started = loop.iteration
    error, losses = attempt(loop.train, 2)
    return ended, saved, started, error, losses, loop.model.parameters()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each rank's findings, without the patch and with it."""
    folders = [str(tmp_path_factory.mktemp("checkpoints")) for _ in range(2)]
    return [
        run_cells(found_by_rank, 2, folder, env=env) for folder, env in zip(folders, (WITHOUT, {}), strict=True)
    ]


@pytest.fixture
def has_the_fault(runs):
    (verdict,) = {found["as it is"] for run in runs for found in run}
    assert verdict in ("needed", "fixed")
    return verdict == "needed"


@pytest.mark.quick
def test_without_the_patch_a_transient_fault_is_saved_and_cannot_be_resumed(runs, has_the_fault):
    for found in runs[0]:
        (checkpoint, leave, code), error = found["transient"]
        assert (checkpoint, leave, code) == (has_the_fault, True, FAILED)
        assert error == "TypeError"  # what is saved in mid-rerun, in any version


@pytest.mark.quick
def test_with_the_patch_the_job_ends_and_nothing_is_saved(runs):
    for found in runs[1]:
        assert found["transient"][0] == (False, True, FAILED)


def test_every_other_answer_is_megatrons(runs):
    for without, found in zip(*runs, strict=True):
        assert found["none"] == found["disabled"] == ((False, False, 0), None)
        assert found["lasting"] == ((True, True, TO_BE_RESUMED), None)
        assert [without[name] for name in ("none", "disabled", "lasting")] == [
            found[name] for name in ("none", "disabled", "lasting")
        ]


@needs_training
def test_a_job_without_the_patch_cannot_go_on(runs, has_the_fault):
    for found in runs[0]:
        ended, saved, started, error, text, _ = found["trained"]
        assert ended == ("SystemExit", str(FAILED))
        if has_the_fault:
            assert saved == [f"iter_{SAVED:07d}", f"iter_{INTERRUPTED:07d}"]
            assert started == INTERRUPTED
            assert (error, text) == ("TypeError", "'NoneType' object is not subscriptable")


@needs_training
def test_with_the_patch_it_goes_on_from_its_last_checkpoint(runs):
    for found in runs[1]:
        ended, saved, started, error, *_ = found["trained"]
        assert ended == ("SystemExit", str(FAILED))
        assert saved == [f"iter_{SAVED:07d}"]
        assert started == SAVED
        assert error is None
    reference = run_ranks(plain_steps, 2, {}, ADAM, SAVED + 2, env=WITHOUT)
    assert_same([found["trained"][4:] for found in runs[1]], reference, first=SAVED)
