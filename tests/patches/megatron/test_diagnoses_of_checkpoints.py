"""Verdicts of patches of checkpoints, two diagnoses each, on the real code and on code made up."""

import importlib
import sys
from unittest import mock

import pytest
import torch
from rigs.diagnosed_code import made_up, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts, words
from rigs.needs import needs_megatron

KEY = "rerun_state_machine_state"


def save_state_dict_async_plan(*args, **kwargs): ...  # the diagnoses replace these in the functions below


def determine_main_replica_uniform_distribution(*args): ...


# ------------------------------------------------------------------------------------------ made-up saves
def plans(self, sharded_state_dict, checkpoint_dir):
    cached = self.cached_central_plan, self.cached_local_plan, self.validated_cache_reuse
    planned = save_state_dict_async_plan(sharded_state_dict, None, cached_ckpt_structure=cached)
    _, self.cached_central_plan, self.cached_local_plan, self.validated_cache_reuse, _ = planned


def looks(self, sharded_state_dict, checkpoint_dir):
    known, self.known = vars(self).get("known"), sorted(sharded_state_dict)
    if known != self.known:
        self.cached_central_plan = self.cached_local_plan = None
    cached = self.cached_central_plan, self.cached_local_plan, self.validated_cache_reuse
    planned = save_state_dict_async_plan(sharded_state_dict, None, cached_ckpt_structure=cached)
    _, self.cached_central_plan, self.cached_local_plan, self.validated_cache_reuse, _ = planned


def looks_together(self, sharded_state_dict, checkpoint_dir):
    torch.distributed.all_reduce(torch.ones(1))


def forgets(self, sharded_state_dict, checkpoint_dir):
    save_state_dict_async_plan(sharded_state_dict, None)


# ------------------------------------------------------------------------------------------ made-up distributions
def distributes(self, sharded_state_dict):
    if not self.cached_distribution:
        self.cached_distribution = determine_main_replica_uniform_distribution(sharded_state_dict)


def distributes_what_it_sees(self, sharded_state_dict):
    if vars(self).get("known") != sorted(sharded_state_dict):
        self.known = sorted(sharded_state_dict)
        determine_main_replica_uniform_distribution(sharded_state_dict)


def distributes_always(self, sharded_state_dict):
    determine_main_replica_uniform_distribution(sharded_state_dict)


def distributes_elsewhere(self, sharded_state_dict):
    self.something_new()


def of_plans():
    from megapatch.patches.megatron.save_plan_cache import diagnose_plans as diagnose

    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    strategy = module.TorchDistSaveShardedStrategy
    changes = {
        **made_up(strategy, "async_save", plans, looks, looks_together, forgets),
        **other_leaves(module),
    }
    return verdicts_of(diagnose, module, changes)


def of_distributions():
    from megapatch.patches.megatron.save_plan_cache import diagnose_distribution as diagnose

    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.fully_parallel")
    wrapper = module.FullyParallelSaveStrategyWrapper
    distributing = distributes, distributes_what_it_sees, distributes_always, distributes_elsewhere
    changes = {
        **made_up(wrapper, "apply_saving_parallelization", *distributing),
        **other_leaves(module),
    }
    return verdicts_of(diagnose, module, changes)


def other_leaves(module):
    leaf = module.ShardedTensor
    fields = {name: field for name, field in leaf.__dataclass_fields__.items() if name != "local_shape"}
    return {"no local_shape": (leaf, "__dataclass_fields__", fields)}


# ------------------------------------------------------------------------------------------ the rerun state
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

    name = "maybe_report_missing_and_unexpected_keys"
    found = verdicts_of(diagnose, module, made_up(module, name, forgives, never_raises, raises_another))
    with mock.patch.dict(sys.modules):
        del sys.modules["megatron.core.rerun_state_machine"]
        found["without the machine's module"] = words(diagnose(module))
    return found


# ------------------------------------------------------------------------------------------ the checks
def verdicts(rank, world_size):
    torch.distributed.destroy_process_group()  # there is none when Megatron is imported
    return {"plans": of_plans(), "distributions": of_distributions(), "saving": saving(), "loading": loading()}


@pytest.fixture(scope="module")
def found():
    return of_a_rank(verdicts)


LACKING = {"no local_shape": ("unknown", "not found: field local_shape of ShardedTensor")}


@needs_megatron
def test_plans(found):
    needed = ("needed", "the plan is reused although the structure has changed")
    expected = {
        **LACKING,
        "as it is": needed,
        "plans": needed,
        "looks": ("fixed", "a changed structure is planned again"),
        "looks_together": ("unknown", "AttributeError"),
        "forgets": ("unknown", "expected the plan to be reused for the same structure"),
    }
    assert_verdicts(found["plans"], expected)


@needs_megatron
def test_distributions(found):
    needed = ("needed", "the distribution is reused although the structure has changed")
    expected = {
        **LACKING,
        "as it is": needed,
        "distributes": needed,
        "distributes_what_it_sees": ("fixed", "a changed structure is distributed again"),
        "distributes_always": ("unknown", "after each save: 1, 2, 3"),
        "distributes_elsewhere": ("unknown", "TypeError"),
    }
    assert_verdicts(found["distributions"], expected)


@needs_megatron
def test_the_state_in_a_save(found):
    found = found["saving"]
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


@needs_megatron
def test_the_state_in_a_load(found):
    needed = ("needed", f"raises for {KEY}")
    expected = {
        "as it is": needed,
        "forgives": ("fixed", f"does not raise for {KEY}"),
        "never_raises": ("unknown", "expected missing keys to raise"),
        "raises_another": ("unknown", "ValueError: another"),
        "without the machine's module": needed,
    }
    assert_verdicts(found["loading"], expected)
