"""megatron.rerun-state-dict: checkpoints of the real dist_checkpointing, at 2 ranks."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from rigs.megatron.options import attempt, iterate, new_machine, quick_writer, rerun, rerun_data

from megapatch import apply, restore
from megapatch.testing import init_parallel, run_ranks

PATCH = "megatron.rerun-state-dict"
NEW_TORCH = "megatron.strict-loads-with-new-torch"  # without it torch 2.14 and later load at no other strictness
KEY = "rerun_state_machine_state"
FORMAT = "torch_dist"
LENIENT = (
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "return_unexpected",
    "return_all",
    "ignore_all",
)
STRICTNESSES = (*LENIENT, "raise_all")


def weights(name, rank, world_size, value):
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor.from_rank_offsets(name, torch.full((4,), value), (0, rank, world_size))


def save(path, rank, world_size, strategy, state):
    """As save_checkpoint() does it: a rerun state goes in if there is one."""
    from megatron.core import dist_checkpointing

    if rank == 0:
        os.makedirs(path)
    torch.distributed.barrier()
    tree = {name: weights(name, rank, world_size, 1.0 + rank) for name in ("weights", "bias")}
    if state:
        tree["rerun_state_machine"] = state
    dist_checkpointing.save(tree, path, strategy)


def load(path, rank, world_size, strict, template=None, tensors=("weights", "bias")):
    """Load it as strictly as that. Returns the error's name, its text, warnings, missing keys and the state."""
    from megatron.core import dist_checkpointing

    tree = {name: weights(name, rank, world_size, 0.0) for name in tensors}
    if template:
        tree["rerun_state_machine"] = template
    with Warnings() as warnings:
        error, loaded = attempt(dist_checkpointing.load, tree, path, strict=strict)
    if error:
        return SimpleNamespace(error=error, text=loaded, warnings=warnings.text)
    missing = None
    if strict.startswith("return_"):
        loaded, missing, _ = loaded
    assert all(loaded[name].tolist() == [1.0 + rank] * 4 for name in tensors)
    state = loaded.get("rerun_state_machine")
    return SimpleNamespace(error=None, warnings=warnings.text, missing=missing, state=state)


class Warnings(logging.Handler):
    """Return the answers of the code that checks a load's keys."""

    text = ""

    def emit(self, record):
        self.text += record.getMessage()

    def __enter__(self):
        self.logger = logging.getLogger("megatron.core.dist_checkpointing.validation")
        self.logger.addHandler(self)
        return self

    def __exit__(self, *exception):
        self.logger.removeHandler(self)


def checkpoints(rank, world_size, folder, older):
    """Save an idle state, then a pending one with the first one's plan; load both in all ways, and an older one.

    `older` is a checkpoint to load as well, or None.
    """
    import megatron.core
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    if megatron.core.__version__.startswith("0.12."):
        return None  # its writer does not work with this torch
    init_parallel(tp=world_size)
    quick_writer()
    allow_enums()
    me, found = (rank, world_size), {}
    machine, data = new_machine(), rerun_data(rank)
    strategy = TorchDistSaveShardedStrategy(FORMAT, 1, thread_count=1)
    strategy.use_cached_ckpt_structure = True  # --ckpt-assume-constant-structure
    idle, pending, bare = f"{folder}/idle", f"{folder}/pending", f"{folder}/bare"

    iterate(machine, data)
    save(idle, *me, strategy, machine.state_dict(data, FORMAT))
    _, state = iterate(machine, data, faulty=rank == 1)
    fault = machine.state_dict(data, FORMAT)
    payload = repr(fault["sharded"].data)
    save(pending, *me, strategy, fault)
    save(bare, *me, TorchDistSaveShardedStrategy(FORMAT, 1, thread_count=1), None)
    found["state"], found["payload"] = state, payload

    common = dist_checkpointing.load_common_state_dict(idle).get("rerun_state_machine")
    if hasattr(machine, "validate_state_dict"):  # how load_checkpoint() decides whether to ask for the state
        found["idle is asked for"] = new_machine().validate_state_dict(common)

    def template():
        new = new_machine()
        return new.state_dict(None, FORMAT, **({"force": True} if hasattr(new, "validate_state_dict") else {}))

    for strict in STRICTNESSES:
        found["idle", strict] = load(idle, *me, strict)
        found["pending, ignored", strict] = load(pending, *me, strict)
        found["bare", strict] = load(bare, *me, strict)
        found["older", strict] = older and load(older, *me, strict)
        outcome = found["pending", strict] = load(pending, *me, strict, template())
        outcome.same = not outcome.error and repr(outcome.state.get("sharded")) == payload
    found["other missing"] = load(idle, *me, "raise_all", tensors=("weights",))
    found["other unexpected"] = load(idle, *me, "raise_all", tensors=("weights", "bias", "new"))

    loaded = load(pending, *me, "assume_ok_unexpected", template())
    if not loaded.error:
        machine = new_machine()
        machine.load_state_dict(loaded.state)
        found["loaded"] = machine.state.name, machine.current_iteration
        found["continued"] = iterate(machine, rerun_data(rank), faulty=rank == 1)
    restore(PATCH)
    for strict in STRICTNESSES:
        found["idle, by Megatron alone", strict] = load(idle, *me, strict)
    apply()
    for value in found.values():
        if isinstance(value, SimpleNamespace):
            value.state = None  # its own classes stay there
    return found


def allow_enums():
    """Python 3.11.0 to 3.11.3 pickle members of an Enum by getattr, which Megatron's loader refuses. They cannot
    load any checkpoint of Megatron's own, whose arguments have some."""
    if rerun().RerunMode.DISABLED.__reduce_ex__(2)[0] is getattr:
        torch.serialization.add_safe_globals([getattr])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each rank's findings, without the patch and with it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    unpatched = run_ranks(checkpoints, 2, f"{folder}/unpatched", None, env={"MEGAPATCH_ONLY": NEW_TORCH})
    with_it = {"MEGAPATCH_ONLY": f"{PATCH},{NEW_TORCH}"}
    patched = run_ranks(checkpoints, 2, f"{folder}/patched", f"{folder}/unpatched/idle", env=with_it)
    if patched[0] is None:
        pytest.skip("the writer of megatron-core 0.12 does not work with this torch")
    return unpatched, patched


@pytest.fixture(scope="module")
def defect(saved):
    """Whether this version saves no idle state."""
    return KEY not in saved[0][0]["idle", "log_all"].warnings


def test_without_the_patch_a_faults_checkpoint_cannot_be_loaded(saved, defect):
    for rank, found in enumerate(saved[0]):
        outcome = found["pending", "assume_ok_unexpected"]
        if not defect:
            assert outcome.same
            continue
        assert outcome.error == "CheckpointException"
        assert f"RuntimeError: Missing key in checkpoint state_dict: {KEY}/shard_{rank}_2" in outcome.text
        assert not any(found["pending", strict].same for strict in STRICTNESSES)


def test_a_faults_checkpoint_brings_back_each_ranks_state_at_every_strictness(saved):
    for found in saved[1]:
        assert found["state"] == "WILL_RERUN_FROM_CHECKPOINT"
        for strict in STRICTNESSES:
            assert found["pending", strict].same, strict
    first, second = (found["payload"] for found in saved[1])
    assert first != second


def test_the_loaded_machine_goes_on_with_the_rerun(saved):
    for found in saved[1]:
        assert found["loaded"] == ("WILL_RERUN_FROM_CHECKPOINT", 1)
        # It sees the same NaN on what is the same machine, and asks to be sent elsewhere.
        assert found["continued"] == ((False, True, 16), "RERUNNING_AGAIN_FROM_CHECKPOINT")


KINDS = ("idle", "pending, ignored", "bare", "older")


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_not_asked_for_hinders_no_load(saved, kind):
    for found in saved[1]:
        for strict in STRICTNESSES:
            assert found[kind, strict].error is None, strict
        assert not found.get("idle is asked for")


def test_all_but_raise_all_still_name_it(saved):
    for found in saved[1]:
        for kind in ("idle", "pending, ignored"):
            assert KEY in found[kind, "log_all"].warnings
            assert found[kind, "return_all"].missing == {KEY}
            for strict in ("log_unexpected", "return_unexpected", "ignore_all", "raise_all"):
                assert KEY not in found[kind, strict].warnings
        assert found["bare", "return_all"].missing == set()


def test_what_else_is_missing_or_unexpected_still_raises(saved):
    for found in saved[1]:
        missing, unexpected = found["other missing"], found["other unexpected"]
        assert missing.error == unexpected.error == "CheckpointingException"
        assert "Missing keys (for all ranks): {'bias'}" in missing.text
        assert "Unexpected keys (for this rank): {'new'}" in unexpected.text
        assert "Missing" not in unexpected.text


def test_megatron_alone_reads_an_idle_state_but_for_raise_all(saved, defect):
    unpatched, patched = saved
    found = [(patched, "idle, by Megatron alone")]
    found += [] if defect else [(unpatched, "idle"), (unpatched, "pending, ignored")]
    for by_rank, kind in found:
        for outcomes in by_rank:
            for strict in LENIENT:
                assert outcomes[kind, strict].error is None, strict
            strictly = outcomes[kind, "raise_all"]
            assert strictly.error == "CheckpointingException"
            assert f"Missing keys (for all ranks): {{'{KEY}'}}" in strictly.text
