"""Diagnoses on the real code, and on the same code repaired, of patches that no release has made superfluous."""

import contextlib
import importlib
import inspect

import pytest
from rigs.diagnosed_code import made_up, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.where import needs_megatron

from megapatch.patch import unpatched

DDP = "megatron.core.distributed.distributed_data_parallel"
STRATEGIES = "megatron.core.dist_checkpointing.strategies"
KEY = "rerun_state_machine_state"


def hooks():
    from megapatch.patches.megatron.forward_pre_hook import diagnose

    module = importlib.import_module(DDP)
    ddp = module.DistributedDataParallel

    disable, enable = unpatched(ddp.disable_forward_pre_hook), unpatched(ddp.enable_forward_pre_hook)

    def disables(self, param_sync=True):
        if self.remove_forward_pre_hook_handles:
            disable(self, param_sync)

    def enables(self):
        if not self.remove_forward_pre_hook_handles:
            enable(self)

    switches_off = ddp, "disable_forward_pre_hook", disables
    changes = {
        "half repaired": switches_off,
        "repaired": [switches_off, (ddp, "enable_forward_pre_hook", enables)],
    }
    return verdicts_of(diagnose, module, changes)


def no_sync():
    from megapatch.patches.megatron.nested_no_sync import diagnose

    module = importlib.import_module(DDP)
    ddp = module.DistributedDataParallel

    @contextlib.contextmanager
    def keeps_what_was(self):
        groups = self.bucket_groups + self.expert_parallel_bucket_groups
        before = [group.is_last_microbatch for group in groups]
        for group in groups:
            group.is_last_microbatch = False
        yield
        for group, flag in zip(groups, before, strict=True):
            group.is_last_microbatch = flag

    @contextlib.contextmanager
    def forgets_experts(self):
        before = self.bucket_groups[0].is_last_microbatch
        self.bucket_groups[0].is_last_microbatch = False
        yield
        self.bucket_groups[0].is_last_microbatch = before

    return verdicts_of(diagnose, module, made_up(ddp, "no_sync", keeps_what_was, forgets_experts))


def prepare():
    from megapatch.patches.megatron.prepare_grads_once import diagnose

    module = importlib.import_module("megatron.core.optimizer")
    mixed, chained = module.optimizer.MixedPrecisionOptimizer, module.optimizer.ChainedOptimizer

    def unscales_once(self):
        if getattr(self, "found", None) is None:
            self.found = self._unscale_main_grads_and_check_for_nan()
        return self.found

    changes = {
        "repaired": (mixed, "prepare_grads", unscales_once),
        "repaired in part": (chained, "step", lambda self: True),
    }
    return verdicts_of(diagnose, module, changes)


def gathered():
    from megapatch.patches.megatron.gathered_when_read import diagnose_ddp

    ddp = importlib.import_module("megatron.core.distributed")
    chunk = ddp.DistributedDataParallel

    def gathers(self, *args, **kwargs):
        self.disable_forward_pre_hook()
        return self.module.state_dict(*args, **kwargs)

    changes = {
        "repaired in part": (chunk, "state_dict", gathers),
        "repaired": [(chunk, "state_dict", gathers), (chunk, "state_dict_for_save_checkpoint", gathers)],
    }
    return verdicts_of(diagnose_ddp, ddp, changes)


def window():
    """By case: (verdict, reason); of a Megatron that learns nothing (to 0.15) none."""
    from megapatch.patches.megatron.grad_ready_window import diagnose

    module = importlib.import_module("megatron.core")
    buffer = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    group = buffer._ParamAndGradBucketGroup

    def reduces_every_pass(self, param):
        self.per_param_grad_ready_counts[param] = self.per_param_grad_ready_counts.get(param, 0) + 1
        if not self.is_first_batch and self.golden_per_param_grad_ready_counts == {param: 1}:
            self.start_grad_sync()

    def reduces_what_is_left(self):
        if self.grad_reduce_handle is None:
            self.start_grad_sync()

    finishes = group, "finish_grad_sync", reduces_what_is_left
    changes = {
        "half repaired": finishes,
        "repaired": [(group, "register_grad_ready", reduces_every_pass), finishes],
    }
    learns = "golden_per_param_grad_ready_counts" in inspect.getsource(buffer)
    return verdicts_of(diagnose, module, changes if learns else {})


def plans():
    from megapatch.patches.megatron.save_plan_cache import diagnose_plans

    module = importlib.import_module(f"{STRATEGIES}.torch")

    def looks(self, sharded_state_dict, checkpoint_dir):
        known, self.known = vars(self).get("known"), sorted(sharded_state_dict)
        if known != self.known:
            self.cached_central_plan = self.cached_local_plan = None
        cached = self.cached_central_plan, self.cached_local_plan, self.validated_cache_reuse
        planned = save_state_dict_async_plan(sharded_state_dict, None, cached_ckpt_structure=cached)  # noqa: F821
        _, self.cached_central_plan, self.cached_local_plan, self.validated_cache_reuse, _ = planned

    return verdicts_of(diagnose_plans, module, made_up(module.TorchDistSaveShardedStrategy, "async_save", looks))


def distributions():
    from megapatch.patches.megatron.save_plan_cache import diagnose_distribution

    module = importlib.import_module(f"{STRATEGIES}.fully_parallel")

    def looks(self, sharded_state_dict):
        if vars(self).get("known") != sorted(sharded_state_dict):
            self.known = sorted(sharded_state_dict)
            determine_main_replica_uniform_distribution(sharded_state_dict)  # noqa: F821

    wrapper = module.FullyParallelSaveStrategyWrapper
    changes = made_up(wrapper, "apply_saving_parallelization", looks)
    return verdicts_of(diagnose_distribution, module, changes)


def strict_loads():
    from megapatch.patches.megatron.rerun_state_dict import diagnose_loading

    module = importlib.import_module("megatron.core.dist_checkpointing.validation")

    def forgives(missing_keys, unexpected_keys, raise_error=True):
        if missing_keys - {KEY}:
            raise module.CheckpointingException

    changes = made_up(module, "maybe_report_missing_and_unexpected_keys", forgives)
    return verdicts_of(diagnose_loading, module, changes)


DIAGNOSES = {
    hooks: {
        "half repaired": ("needed", "disable_forward_pre_hook works, enable_forward_pre_hook raises Assertion"),
        "repaired": ("fixed", "can be called again"),
    },
    no_sync: {
        "keeps_what_was": ("fixed", "stays in force"),
        "forgets_experts": ("unknown", "expected no_sync() to clear is_last_microbatch"),
    },
    prepare: {
        "repaired": ("fixed", "not unscaled again"),
        "repaired in part": ("unknown", "1 with ChainedOptimizer.step"),
    },
    gathered: {
        "repaired in part": ("needed", ""),
        "repaired": ("fixed", "gather the parameters"),
    },
    window: {
        "half repaired": ("needed", "in pass 1; after a first step of two, a step of one is reduced in finish"),
        "repaired": ("fixed", "after the last"),
    },
    plans: {
        "looks": ("fixed", "a changed structure is planned again"),
    },
    distributions: {
        "looks": ("fixed", "a changed structure is distributed again"),
    },
    strict_loads: {
        "forgives": ("fixed", f"does not raise for {KEY}"),
    },
}


def verdicts(rank, world_size):
    return {of.__name__: of() for of in DIAGNOSES}


@pytest.fixture(scope="module")
def found():
    return of_a_rank(verdicts)


@needs_megatron
@pytest.mark.parametrize("of", DIAGNOSES, ids=lambda of: of.__name__)
def test_diagnosis(found, of):
    if of is window and not found["window"]:
        pytest.skip("this Megatron learns nothing (to 0.15)")
    assert_verdicts(found[of.__name__], DIAGNOSES[of])
