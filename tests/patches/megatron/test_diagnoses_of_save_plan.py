"""What the two diagnoses of megatron.save-plan-cache say of the real code, and of code made up."""

from __future__ import annotations

import contextlib
import importlib
from unittest import mock

import pytest
import torch
from rigs.needs import needs_megatron

from megapatch.patch import MARK
from megapatch.testing import run_ranks


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


def takes_another(self, state_dict, checkpoint_dir): ...


def keeps_nothing(self, backend, version): ...


def keeps_less(self, backend, version, cached_metadata):
    self.use_cached_ckpt_structure = cached_metadata
    self.cached_central_plan = self.cached_global_metadata = None
    self.validated_cache_reuse = False


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


def has_no_cache(self, strategy, group): ...


def has_another_cache(self, strategy, group, do_cache_distribution):
    self.do_cache_distribution = do_cache_distribution


def saves_by_itself(self, sharded_state_dict, checkpoint_dir): ...


def verdicts(rank, world_size):
    torch.distributed.destroy_process_group()  # there is none when Megatron is imported
    return of_plans(), of_distributions()


def of_plans():
    from megapatch.patches.megatron.save_plan_cache import diagnose_plans as diagnose

    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    strategy = module.TorchDistSaveShardedStrategy
    found = {"patched": hasattr(strategy.async_save, MARK), "as it is": words(diagnose(module))}
    for made_up in (plans, looks, looks_together, forgets, takes_another):
        with mock.patch.object(strategy, "async_save", made_up):
            found[made_up.__name__] = words(diagnose(module))
    for made_up in (keeps_nothing, keeps_less):
        with mock.patch.object(strategy, "__init__", made_up):
            found[made_up.__name__] = words(diagnose(module))
    return found | of_missing_names(module, diagnose, "TorchDistSaveShardedStrategy")


def of_distributions():
    from megapatch.patches.megatron.save_plan_cache import diagnose_distribution as diagnose

    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.fully_parallel")
    wrapper = module.FullyParallelSaveStrategyWrapper
    found = {"patched": hasattr(wrapper.apply_saving_parallelization, MARK), "as it is": words(diagnose(module))}
    for made_up in (distributes, distributes_what_it_sees, distributes_always, distributes_elsewhere):
        with mock.patch.object(wrapper, "apply_saving_parallelization", made_up):
            found[made_up.__name__] = words(diagnose(module))
    for made_up in (has_no_cache, has_another_cache):
        with mock.patch.object(wrapper, "__init__", made_up):
            found[made_up.__name__] = words(diagnose(module))
    with mock.patch.object(wrapper, "save", saves_by_itself):
        found["saves_by_itself"] = words(diagnose(module))
    return found | of_missing_names(module, diagnose, "FullyParallelSaveStrategyWrapper")


def of_missing_names(module, diagnose, owner):
    found = {}
    for name in ("ShardedTensor", "ShardedObject", owner):
        with mock.patch.object(module, name, None):
            found[f"no {name}"] = words(diagnose(module))
    leaf = module.ShardedTensor
    with contextlib.ExitStack() as stack:
        fields = {name: field for name, field in leaf.__dataclass_fields__.items() if name != "local_shape"}
        stack.enter_context(mock.patch.object(leaf, "__dataclass_fields__", fields))
        found["no local_shape"] = words(diagnose(module))
    return found


def words(verdict):
    return verdict.kind.value, verdict.reason


@pytest.fixture(scope="module")
def found():
    (found,) = run_ranks(verdicts, 1)
    return found


LACKING = {
    "no ShardedTensor": ("unknown", "field key of ShardedTensor"),
    "no ShardedObject": ("unknown", "field key of ShardedObject"),
    "no local_shape": ("unknown", "not found: field local_shape of ShardedTensor"),
}


def assert_verdicts(found, expected):
    assert found.pop("patched")  # and seen through
    expected = {**LACKING, **expected}
    assert found.keys() == expected.keys()
    for case, (kind, text) in expected.items():
        assert found[case][0] == kind, (case, found[case])
        assert text in found[case][1], (case, found[case])


@needs_megatron
def test_plans(found):
    needed = ("needed", "the plan is reused although the structure has changed")
    expected = {
        "as it is": needed,
        "plans": needed,
        "looks": ("fixed", "a changed structure is planned again"),
        "looks_together": ("unknown", "AttributeError"),
        "forgets": ("unknown", "expected the plan to be reused for the same structure"),
        "takes_another": ("unknown", "not found: parameter sharded_state_dict of megatron."),
        "keeps_nothing": ("absent", "keeps no plans"),
        "keeps_less": ("unknown", "not found: cached_local_plan in megatron."),
        "no TorchDistSaveShardedStrategy": ("unknown", "TorchDistSaveShardedStrategy"),
    }
    assert_verdicts(found[0], expected)


@needs_megatron
def test_distributions(found):
    needed = ("needed", "the distribution is reused although the structure has changed")
    expected = {
        "as it is": needed,
        "distributes": needed,
        "distributes_what_it_sees": ("fixed", "a changed structure is distributed again"),
        "distributes_always": ("unknown", "after each save: 1, 2, 3"),
        "distributes_elsewhere": ("unknown", "TypeError"),
        "has_no_cache": ("absent", "keeps no distribution"),
        "has_another_cache": ("unknown", "not found: cached_distribution in megatron."),
        "saves_by_itself": ("unknown", "not found: apply_saving_parallelization in megatron."),
        "no FullyParallelSaveStrategyWrapper": ("unknown", "FullyParallelSaveStrategyWrapper"),
    }
    assert_verdicts(found[1], expected)
