"""megatron.rerun-state-dict without files: what the real machine gives, and which keys a load may leave out."""

from types import SimpleNamespace

import pytest
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED, attempt, iterate, new_machine, rerun_data
from rigs.megatron.save import STRICTNESSES

KEY = "rerun_state_machine_state"
FORMAT = "torch_dist"
ENABLED = ("VALIDATE_RESULTS", "REPORT_DETERMINISM_STATS")


def structure(state):
    """Of a state to be saved, what has to be the same in all checkpoints."""
    shard = state["sharded"]
    return list(state), type(shard).__name__, shard.key, shard.global_shape, shard.global_offset, shard.replica_id


def given(rank, world_size):
    """Return the result of state_dict() in each mode, state and format; None where it always gives the state."""
    if not hasattr(new_machine(), "validate_state_dict"):
        return None
    found, raw = {}, iter(range(4))
    for mode in ENABLED:
        machine = new_machine(mode)
        idle = machine.state_dict(raw, FORMAT)  # what 0.18 and later allow as well
        found[mode] = idle and structure(idle)
        found[mode, "positional"] = repr(machine.state_dict(raw, FORMAT, False)) == repr(idle)
        found[mode, "keywords"] = repr(machine.state_dict(data_iterator=raw, ckpt_format=FORMAT)) == repr(idle)
        found[mode, "taken for nothing"] = not machine.validate_state_dict(idle)
        found[mode, "iterators"] = idle and idle["sharded"].data["data_iterator_checkpoints"]
        found[mode, "other formats"] = [
            machine.state_dict(raw, other) for other in ("torch", "zarr", "fsdp_dtensor")
        ]
    assert next(raw) == 0

    machine = new_machine("DISABLED")
    outside = [repr(machine.state_dict(raw, name)) for name in (FORMAT, "torch")]
    machine.should_run_forward_backward(None)
    found["DISABLED"] = [*outside, repr(machine.state_dict(raw, FORMAT))]

    machine, data = new_machine(), rerun_data(rank)
    iterate(machine, data)  # nothing is validated in the first one
    iterate(machine, data, faulty=rank == 1)
    pending = machine.state_dict(data, FORMAT)
    found["pending"] = structure(pending), pending["state"].name, machine.validate_state_dict(pending)
    found["microbatches"] = pending["sharded"].data["data_iterator_checkpoints"][0]["saved_microbatches"]
    found["pending, other format"] = machine.state_dict(data, "torch")
    found["pending, raw iterator"], _ = attempt(machine.state_dict, raw, FORMAT)
    forced = new_machine().state_dict(None, "torch", force=True)
    found["forced"] = structure(forced)
    return found


def checked():
    """Return Megatron's answers at each strictness for checkpoints with keys that a load omits."""
    from megatron.core.dist_checkpointing.validation import StrictHandling, validate_integrity_and_strict_load

    def check(strict, *omitted):
        saved = {key: SimpleNamespace(key=key) for key in omitted}
        error, result = attempt(
            validate_integrity_and_strict_load, {}, StrictHandling(strict), False, [], [[]], saved
        )
        return (error, result) if error else (error, sorted(result[1]))

    assert [each.value for each in StrictHandling] == list(STRICTNESSES)
    return {(strict, keys): check(strict, *keys) for strict in STRICTNESSES for keys in ((KEY,), (KEY, "other"))}


def both(rank, world_size):
    return given(rank, world_size), checked()


@pytest.fixture(scope="module")
def runs():
    """Each rank's findings, without the patch and with it."""
    return run_with_megatron(both, 2, env=UNPATCHED), run_with_megatron(both, 2)


@pytest.fixture(scope="module")
def states(runs):
    unpatched, patched = ([found for found, _ in run] for run in runs)
    if patched[0] is None:
        pytest.skip("this version always saves the rerun state")
    return unpatched, patched


@pytest.mark.quick
def test_an_enabled_machine_gives_the_same_structure_whether_a_rerun_is_pending_or_not(states):
    for rank, found in enumerate(states[1]):
        keys = ["mode", "state", "current_iteration", "sharded"]
        expected = keys, "ShardedObject", KEY, (2,), (rank,), 0
        assert found["pending"] == (expected, "WILL_RERUN_FROM_CHECKPOINT", True)
        assert found["forced"] == expected
        for mode in ENABLED:
            assert found[mode] == expected
            assert found[mode, "positional"] and found[mode, "keywords"]
            assert found[mode, "taken for nothing"]


def test_without_a_pending_rerun_data_iterators_are_not_looked_at(states):
    for rank, found in enumerate(states[1]):  # raw ones were given
        assert found["VALIDATE_RESULTS", "iterators"] is None
        assert found["pending, raw iterator"] == "AssertionError"
        assert found["microbatches"] == [100 * rank + 2, 100 * rank + 3]


def test_a_disabled_machine_and_other_formats_give_none(states):
    for found in states[1]:
        assert found["DISABLED"] == ["None"] * 3
        assert found["VALIDATE_RESULTS", "other formats"] == [None] * 3
        assert found["pending, other format"] is None


@pytest.mark.quick
def test_without_the_patch_only_the_idle_state_differs(states):
    for unpatched, patched in zip(*states, strict=True):
        if unpatched["VALIDATE_RESULTS"] is not None:  # from 0.18 on
            assert unpatched == patched
            continue
        same = ("pending", "microbatches", "pending, other format", "pending, raw iterator", "forced")
        assert [unpatched[name] for name in same] == [patched[name] for name in same]
        assert unpatched["VALIDATE_RESULTS", "other formats"] == [None] * 3


def test_only_a_strict_load_does_without_the_state_and_only_without_the_state(runs):
    unpatched, patched = (run[0][1] for run in runs)
    changed = [case for case in patched if patched[case] != unpatched[case]]
    assert changed == [("raise_all", (KEY,)), ("raise_all", (KEY, "other"))]
    error, text = unpatched["raise_all", (KEY,)]
    assert error == "CheckpointingException" and KEY in text
    assert patched["raise_all", (KEY,)] == (None, [KEY])
    error, text = patched["raise_all", (KEY, "other")]
    assert error == "CheckpointingException" and "{'other'}" in text
    assert patched["return_all", (KEY, "other")] == (None, sorted([KEY, "other"]))
