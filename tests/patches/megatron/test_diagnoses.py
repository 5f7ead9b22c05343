"""Verdicts on the real code, of repaired code, and of code that they do not know."""

import contextlib
import importlib
import inspect

import pytest
from rigs.diagnosed_code import of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts, words

from megapatch.patch import unpatched

DDP = "megatron.core.distributed.distributed_data_parallel"


def hook_verdicts():
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


def test_forward_pre_hook(found):
    expected = {
        "as it is": (
            "needed",
            "disable_forward_pre_hook raises KeyError, enable_forward_pre_hook raises Assertion",
        ),
        "half repaired": ("needed", "disable_forward_pre_hook works, enable_forward_pre_hook raises Assertion"),
        "repaired": ("fixed", "can be called again"),
    }
    assert_verdicts(found["hook"], expected)


def no_sync_verdicts():
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

    @contextlib.contextmanager
    def never_ends(self):
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            group.is_last_microbatch = False
        yield

    changes = {
        "repaired": (ddp, "no_sync", keeps_what_was),
        "no experts": (ddp, "no_sync", forgets_experts),
        "never ends": (ddp, "no_sync", never_ends),
    }
    return verdicts_of(diagnose, module, changes)


def test_nested_no_sync(found):
    assert_verdicts(
        found["no_sync"],
        {
            "as it is": ("needed", "ends the outer one"),
            "repaired": ("fixed", "stays in force"),
            "no experts": ("unknown", "expected no_sync() to clear is_last_microbatch"),
            "never ends": ("unknown", "after: cleared and cleared"),
        },
    )


def prepare_verdicts():
    from megapatch import restore
    from megapatch.patches.megatron.prepare_grads_once import diagnose

    module = importlib.import_module("megatron.core.optimizer")
    mixed, chained = module.optimizer.MixedPrecisionOptimizer, module.optimizer.ChainedOptimizer

    def unscales_once(self):
        if getattr(self, "found", None) is None:
            self.found = self._unscale_main_grads_and_check_for_nan()
        return self.found

    def always_overflows(self):
        return True

    changes = {
        "repaired": (mixed, "prepare_grads", unscales_once),
        "repaired in part": (chained, "step", always_overflows),
        "unscaled elsewhere": (mixed, "prepare_grads", always_overflows),
    }
    found = verdicts_of(diagnose, module, changes)
    restore("megatron.prepare-grads-once")
    return {**found, "restored": words(diagnose(module))}


def test_prepare_grads_once(found):
    methods = "MixedPrecisionOptimizer.prepare_grads, MixedPrecisionOptimizer.step, ChainedOptimizer.step"
    assert_verdicts(
        found["prepare"],
        {
            "as it is": ("needed", methods),
            "restored": ("needed", methods),
            "repaired": ("fixed", "not unscaled again"),
            "repaired in part": ("unknown", "1 with ChainedOptimizer.step"),
            "unscaled elsewhere": ("unknown", "0 with MixedPrecisionOptimizer.step"),
        },
    )


def gathered_verdicts():
    from megapatch.patches.megatron import gathered_when_read as patch

    ddp = importlib.import_module("megatron.core.distributed")
    chunk = ddp.DistributedDataParallel

    def gathers(self, *args, **kwargs):
        self.disable_forward_pre_hook()
        return self.module.state_dict(*args, **kwargs)

    changes = {
        "repaired in part": (chunk, "state_dict", gathers),
        "repaired": [(chunk, "state_dict", gathers), (chunk, "state_dict_for_save_checkpoint", gathers)],
    }
    return verdicts_of(patch.diagnose_ddp, ddp, changes)


def test_gathered_when_read(found):
    expected = {
        "as it is": ("needed", "read parameters that are not gathered"),
        "repaired in part": ("needed", ""),
        "repaired": ("fixed", "gather the parameters"),
    }
    assert_verdicts(found["gathered"], expected)


def window_verdicts():
    """By case: (verdict, reason); and whether Megatron's code speaks of what it has learned."""
    from megapatch.patches.megatron.grad_ready_window import diagnose

    module = importlib.import_module("megatron.core")
    buffer = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    group = buffer._ParamAndGradBucketGroup

    def takes_nothing(self): ...

    def learns_nothing(self, param):
        self.params_with_grad.add(param)

    def reduces_every_pass(self, param):
        self.per_param_grad_ready_counts[param] = self.per_param_grad_ready_counts.get(param, 0) + 1
        if not self.is_first_batch and self.golden_per_param_grad_ready_counts == {param: 1}:
            self.start_grad_sync()

    def reduces_what_is_left(self):
        if self.grad_reduce_handle is None:
            self.start_grad_sync()

    def never_early(self, param): ...

    changes = {
        "other groups": (group, "__init__", takes_nothing),
        "never early": (group, "register_grad_ready", never_early),
        "half repaired": (group, "finish_grad_sync", reduces_what_is_left),
        "learns nothing": [(group, "__init__", takes_nothing), (group, "register_grad_ready", learns_nothing)],
        "repaired": [
            (group, "register_grad_ready", reduces_every_pass),
            (group, "finish_grad_sync", reduces_what_is_left),
        ],
    }
    learns = "golden_per_param_grad_ready_counts" in inspect.getsource(buffer)
    return verdicts_of(diagnose, module, changes), learns


def test_grad_ready_window(found):
    verdicts, learns = found["window"]
    if not learns:  # up to 0.15
        assert verdicts["as it is"] == ("absent", "Megatron does not learn how often gradients become ready")
        assert verdicts["never early"][0] == "unknown"
        return
    expected = {
        "as it is": (
            "needed",
            "reduced in pass 1; after a first step of two, a step of one fails with AssertionError",
        ),
        "learns nothing": ("absent", "does not learn"),
        "other groups": ("unknown", "params_with_grad in megatron.core.distributed."),
        "never early": ("unknown", "the later one fails with AssertionError"),
        "half repaired": ("needed", "in pass 1; after a first step of two, a step of one is reduced in finish"),
        "repaired": ("fixed", "after the last"),
    }
    assert_verdicts(verdicts, expected)


def verdicts(rank, world_size):
    return {
        "hook": hook_verdicts(),
        "no_sync": no_sync_verdicts(),
        "gathered": gathered_verdicts(),
        "window": window_verdicts(),
        "prepare": prepare_verdicts(),  # the last, as it restores the patch
    }


@pytest.fixture(scope="module")
def found():
    return of_a_rank(verdicts)
