"""megatron.rerun-state-dict in Megatron's own train(), save_checkpoint() and load_checkpoint(), at 2 ranks."""

import importlib
from types import SimpleNamespace

import pytest
from rigs.megatron.options import ADAM, assert_same_parameters, attempt, needs_training, quick_writer, rerun

from megapatch.testing import MegatronLoop, init_parallel, run_ranks, tiny_gpt

pytestmark = needs_training

KEY = "rerun_state_machine_state"
# train() is called again in either; and a new plan would save what this patch is about, too.
WITH = {"MEGAPATCH_DISABLE": "megatron.save-plan-cache"}
WITHOUT = {"MEGAPATCH_DISABLE": "megatron.save-plan-cache,megatron.rerun-state-dict"}
STRICTNESSES = ("assume_ok_unexpected", "raise_all")
SCHEDULER = SimpleNamespace(step=lambda increment: None, state_dict=dict, load_state_dict=lambda state: None)
IDLE, PENDING = 2, 3  # iterations with a checkpoint


class NotANumber:
    """Makes the model's losses NaN as long as it is on."""

    on = False

    def __init__(self, model):
        model.chunks[0].module.register_forward_hook(self)

    def __call__(self, module, inputs, losses):
        return losses * float("nan") if self.on else losses


def new_loop(folder, *flags):
    flags = ["--save", folder, "--load", folder, "--save-interval", "100", *flags]
    model = tiny_gpt(hooks=False, **ADAM)
    return MegatronLoop(model, rerun_mode="validate_results", flags=[*flags, "--ckpt-assume-constant-structure"])


def save(loop):
    """As train() does, but with a raw data iterator."""
    importlib.import_module("megatron.training.checkpointing").save_checkpoint(
        loop.iteration,
        loop.model.chunks,
        loop.model.optimizer,
        SCHEDULER,
        0,
        checkpointing_context=loop.checkpointing_context,
        train_data_iterator=iter(()),
    )


def load(folder, iteration, strict):
    """Load a checkpoint into a new model and a new machine; the loop, and what came of it."""
    loop = new_loop(folder, "--ckpt-step", str(iteration), "--dist-ckpt-strictness", strict)
    for parameter in loop.model.chunks[0].parameters():
        parameter.data.zero_()
    module = importlib.import_module("megatron.training.checkpointing")
    error, result = attempt(
        module.load_checkpoint,
        loop.model.chunks,
        loop.model.optimizer,
        SCHEDULER,
        checkpointing_context=loop.checkpointing_context,
    )
    machine = rerun().get_rerun_state_machine()
    return loop, SimpleNamespace(
        error=error,
        text=result if error else "",
        state=machine.state.name,
        payload=payload(machine),
        microbatches=(machine.data_iterator_checkpoints or [{}])[0].get("saved_microbatches"),
        parameters=None if error else loop.model.parameters(),
    )


def payload(machine):
    """Return a machine's notes of a fault, as text, so that NaN equals NaN."""
    return repr(machine.state_dict(None, "torch_dist", force=True)["sharded"].data)


def trained(rank, world_size, folder, older):
    """Train and save, then have a fault for which train() saves by itself; load both, and an older checkpoint."""
    init_parallel()
    quick_writer()
    found = {}
    loop = new_loop(folder)
    nan = NotANumber(loop.model)
    loop.train(2)
    found["saved", IDLE] = loop.model.parameters()
    save(loop)
    loop.train(1)
    found["saved", PENDING] = loop.model.parameters()
    nan.on = rank == 1
    found["fault"] = attempt(loop.train, 1)
    machine = rerun().get_rerun_state_machine()
    found["state"], found["payload"] = machine.state.name, payload(machine)
    found["microbatches"] = loop.model.microbatches(3)

    for strict in STRICTNESSES:
        if older:
            _, found["older", strict] = load(older, IDLE, strict)
        _, found["idle", strict] = load(folder, IDLE, strict)
        loop, found["pending", strict] = load(folder, PENDING, strict)
    if not found["pending", strict].error:
        NotANumber(loop.model).on = rank == 1
        loop.iteration = PENDING
        found["goes on"] = attempt(loop.train, 1), rerun().get_rerun_state_machine().state.name
    if older:
        found["resumed"] = resumed(rank, older, f"{folder}/resumed")
    return found


def resumed(rank, older, folder):
    """Go on from a checkpoint without a rerun state, save, have a fault, and load what train() saves for it."""
    loop, _ = load(older, IDLE, "assume_ok_unexpected")
    loop.args.save, loop.iteration = folder, IDLE
    nan = NotANumber(loop.model)
    loop.train(1)
    save(loop)
    loop.train(1)
    nan.on = rank == 1
    error, _ = attempt(loop.train, 1)
    return error, load(folder, IDLE + 2, "raise_all")[1].state


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each rank's findings, without the patch and with it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    without = run_ranks(trained, 2, f"{folder}/unpatched", None, env=WITHOUT)
    return without, run_ranks(trained, 2, f"{folder}/patched", f"{folder}/unpatched", env=WITH)


@pytest.fixture(scope="module")
def has_idle_state(runs):
    """Whether this version saves an idle state: then it cannot load it strictly."""
    return runs[0][0]["idle", "raise_all"].error is not None


def test_without_the_patch(runs, has_idle_state):
    for rank, found in enumerate(runs[0]):
        assert found["fault"] == ("SystemExit", "16")
        loaded, strictly = found["pending", "assume_ok_unexpected"], found["pending", "raise_all"]
        if has_idle_state:
            assert f"Missing keys (for all ranks): {{'{KEY}'}}" in found["idle", "raise_all"].text
            assert loaded.error is strictly.error is None
            continue
        assert loaded.error == "CheckpointException"
        assert f"RuntimeError: Missing key in checkpoint state_dict: {KEY}/shard_{rank}_2" in loaded.text
        assert strictly.error == "CheckpointingException"


@pytest.mark.parametrize("strict", STRICTNESSES)
def test_a_faults_checkpoint_brings_back_model_and_rerun_state(runs, strict):
    for found in runs[1]:
        assert found["fault"] == ("SystemExit", "16")
        loaded = found["pending", strict]
        assert loaded.error is None
        assert loaded.state == found["state"] == "WILL_RERUN_FROM_CHECKPOINT"
        assert loaded.payload == found["payload"]
        assert [each.tolist() for each in loaded.microbatches] == [each.tolist() for each in found["microbatches"]]
        assert_same_parameters(loaded.parameters, found["saved", PENDING])


def test_train_goes_on_with_the_rerun(runs):
    for found in runs[1]:
        # The same NaN on what is the same machine: it asks to be sent elsewhere.
        assert found["goes on"] == (("SystemExit", "16"), "RERUNNING_AGAIN_FROM_CHECKPOINT")


def test_a_job_that_goes_on_from_an_older_checkpoint_saves_the_state(runs):
    for found in runs[1]:
        assert found["resumed"] == ("SystemExit", "WILL_RERUN_FROM_CHECKPOINT")


@pytest.mark.parametrize("strict", STRICTNESSES)
@pytest.mark.parametrize("kind", ["idle", "older"])
def test_a_checkpoint_without_a_fault_leaves_the_machine_alone(runs, kind, strict):
    for found in runs[1]:
        loaded = found[kind, strict]
        assert loaded.error is None
        assert loaded.state == "NOT_RUNNING_YET"
        assert loaded.microbatches is None
        assert_same_parameters(loaded.parameters, found["saved", IDLE])
