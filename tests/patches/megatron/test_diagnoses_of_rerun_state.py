"""Verdicts of the two diagnoses of megatron.rerun-state-dict on the real code, and of code made up."""

import importlib
import sys
from unittest import mock

import pytest
from rigs.diagnosed_code import made_up, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts, words

KEY = "rerun_state_machine_state"


def saving():
    from megapatch.patches.megatron.rerun_state_dict import diagnose_saving as diagnose

    module = importlib.import_module("megatron.core.rerun_state_machine")

    def idle_is_none(self, data_iterator, ckpt_format, force=False):
        ShardedObject = tuple
        return ShardedObject(("rerun_state_machine_state", (self.mode, self.state))) if force else None

    def builds(self, data_iterator, ckpt_format, force=False):
        ShardedObject = tuple
        return ShardedObject(("rerun_state_machine_state", (self.mode, self.state, self.rerun_requested)))

    def gives_one(self, data_iterator, ckpt_format, force=False):
        ShardedObject = tuple
        return ShardedObject(("rerun_state_machine_state", (self.mode, self.state)))

    def builds_without_force(self, data_iterator, ckpt_format):
        ShardedObject = tuple
        return ShardedObject(("rerun_state_machine_state", (self.mode, self.state, self.rerun_requested)))

    def none_without_force(self, data_iterator, ckpt_format):
        ShardedObject = tuple
        return None if self.mode else ShardedObject(("rerun_state_machine_state", (self.mode, self.state)))

    def raises(self, data_iterator, ckpt_format, force=False):
        ShardedObject = tuple
        raise RuntimeError(ShardedObject(("rerun_state_machine_state", (self.mode, self.state))))

    functions = (idle_is_none, builds, gives_one, builds_without_force, none_without_force, raises)
    found = verdicts_of(diagnose, module, made_up(module.RerunStateMachine, "state_dict", *functions))
    state_dict = getattr(module.RerunStateMachine.state_dict, "__wrapped__", module.RerunStateMachine.state_dict)
    found["takes force"] = "force" in state_dict.__code__.co_varnames
    return found


def loading():
    from megapatch.patches.megatron.rerun_state_dict import diagnose_loading as diagnose

    module = importlib.import_module("megatron.core.dist_checkpointing.validation")

    def forgives(missing_keys, unexpected_keys, raise_error=True):
        if missing_keys - {KEY}:
            raise module.CheckpointingException

    def never_raises(missing_keys, unexpected_keys, raise_error=True): ...

    def raises_another(missing_keys, unexpected_keys, raise_error=True):
        raise ValueError("another")

    def takes_a_list(keys): ...

    name = "maybe_report_missing_and_unexpected_keys"
    changes = {
        **made_up(module, name, forgives, never_raises, raises_another),
        "not looked up": (module, "validate_integrity_and_strict_load", takes_a_list),
    }
    found = verdicts_of(diagnose, module, changes)
    with mock.patch.dict(sys.modules):
        del sys.modules["megatron.core.rerun_state_machine"]
        found["without the machine's module"] = words(diagnose(module))
    return found


def both(rank, world_size):
    return saving(), loading()


@pytest.fixture(scope="module")
def found():
    return of_a_rank(both)


def test_saving(found):
    found, _ = found
    possible = ("needed", "fixed") if found.pop("takes force") else ("absent",)
    assert found.pop("as it is")[0] in possible
    expected = {
        "idle_is_none": ("needed", "returns None as long as no rerun is pending"),
        "builds": ("fixed", "builds a state"),
        "gives_one": ("fixed", "builds a state"),
        "builds_without_force": ("absent", "has always saved"),
        "none_without_force": ("unknown", "parameter force of megatron.core.rerun_state_machine:"),
        "raises": ("unknown", "RuntimeError"),
    }
    assert_verdicts(found, expected)


def test_loading(found):
    _, found = found
    needed = ("needed", f"raises for {KEY}")
    expected = {
        "as it is": needed,
        "forgives": ("fixed", f"does not raise for {KEY}"),
        "never_raises": ("unknown", "expected missing keys to raise"),
        "raises_another": ("unknown", "ValueError: another"),
        "not looked up": ("unknown", "in megatron.core.dist_checkpointing.validation:validate_integrity_and_"),
        "without the machine's module": needed,
    }
    assert_verdicts(found, expected)
