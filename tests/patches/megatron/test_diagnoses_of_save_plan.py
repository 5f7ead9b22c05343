"""Verdicts of the two diagnoses of megatron.save-plan-cache on the real code, and of code made up."""

import importlib

import pytest
import torch
from rigs.diagnosed_code import made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.imported import run_with_megatron
from rigs.needs import needs_megatron

from megapatch._layers import MARK


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
    changes = {
        **made_up(strategy, "async_save", plans, looks, looks_together, forgets),
        **made_up(strategy, "__init__", keeps_less),
        **other_leaves(module),
    }
    return {"patched": hasattr(strategy.async_save, MARK), **verdicts_of(diagnose, module, changes)}


def of_distributions():
    from megapatch.patches.megatron.save_plan_cache import diagnose_distribution as diagnose

    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.fully_parallel")
    wrapper = module.FullyParallelSaveStrategyWrapper
    distributing = distributes, distributes_what_it_sees, distributes_always, distributes_elsewhere
    changes = {
        **made_up(wrapper, "apply_saving_parallelization", *distributing),
        **made_up(wrapper, "__init__", has_no_cache, has_another_cache),
        **made_up(wrapper, "save", saves_by_itself),
        **other_leaves(module),
    }
    marked = hasattr(wrapper.apply_saving_parallelization, MARK)
    return {"patched": marked, **verdicts_of(diagnose, module, changes)}


def other_leaves(module):
    leaf = module.ShardedTensor
    fields = {name: field for name, field in leaf.__dataclass_fields__.items() if name != "local_shape"}
    return {"no local_shape": (leaf, "__dataclass_fields__", fields)}


@pytest.fixture(scope="module")
def found():
    (found,) = run_with_megatron(verdicts, 1)
    return found


LACKING = {"no local_shape": ("unknown", "not found: field local_shape of ShardedTensor")}


def assert_seen_through(found, expected):
    assert found.pop("patched")
    assert_verdicts(found, {**LACKING, **expected})


@needs_megatron
def test_plans(found):
    needed = ("needed", "the plan is reused although the structure has changed")
    expected = {
        "as it is": needed,
        "plans": needed,
        "looks": ("fixed", "a changed structure is planned again"),
        "looks_together": ("unknown", "AttributeError"),
        "forgets": ("unknown", "expected the plan to be reused for the same structure"),
        "keeps_less": ("unknown", "not found: cached_local_plan in megatron."),
    }
    assert_seen_through(found[0], expected)


@needs_megatron
def test_distributions(found):
    needed = ("needed", "the distribution is reused although the structure has changed")
    expected = {
        "as it is": needed,
        "distributes": needed,
        "distributes_what_it_sees": ("fixed", "a changed structure is distributed again"),
        "distributes_always": ("unknown", "after each save: 1, 2, 3"),
        "distributes_elsewhere": ("unknown", "TypeError"),
        "has_no_cache": ("unknown", "do_cache_distribution"),
        "has_another_cache": ("unknown", "not found: cached_distribution in megatron."),
        "saves_by_itself": ("unknown", "not found: apply_saving_parallelization in megatron."),
    }
    assert_seen_through(found[1], expected)
