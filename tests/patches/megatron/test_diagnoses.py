"""Verdicts on the real code, of repaired code, and of code that they do not know."""

import contextlib
import importlib

from rigs.diagnosed_code import GONE, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts, words
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED, needs_training

from megapatch._layers import MARK
from megapatch.patch import unpatched


def hook_verdicts(rank, world_size):
    from megapatch.patches.megatron.forward_pre_hook import diagnose

    module = importlib.import_module("megatron.core.distributed.distributed_data_parallel")
    ddp = module.DistributedDataParallel

    disable, enable = unpatched(ddp.disable_forward_pre_hook), unpatched(ddp.enable_forward_pre_hook)

    def disables(self, param_sync=True):
        if self.remove_forward_pre_hook_handles:
            disable(self, param_sync)

    def enables(self):
        if not self.remove_forward_pre_hook_handles:
            enable(self)

    def takes_nothing(self): ...

    switches_off = ddp, "disable_forward_pre_hook", disables
    changes = {
        "half repaired": switches_off,
        "repaired": [switches_off, (ddp, "enable_forward_pre_hook", enables)],
        "other attributes": (ddp, "__init__", takes_nothing),
    }
    return {"marked": hasattr(ddp.disable_forward_pre_hook, MARK), **verdicts_of(diagnose, module, changes)}


def test_forward_pre_hook():
    unpatched = run_with_megatron(hook_verdicts, 1, env=UNPATCHED)[0]
    patched = run_with_megatron(hook_verdicts, 1)[0]
    assert (unpatched.pop("marked"), patched.pop("marked")) == (False, True)
    assert patched == unpatched  # a second look, through the patch, gives the same answers
    expected = {
        "as it is": (
            "needed",
            "disable_forward_pre_hook raises KeyError, enable_forward_pre_hook raises Assertion",
        ),
        "half repaired": ("needed", "disable_forward_pre_hook works, enable_forward_pre_hook raises Assertion"),
        "repaired": ("fixed", "can be called again"),
        "other attributes": ("unknown", "expert_parallel_bucket_groups in megatron.core.distributed."),
    }
    assert_verdicts(patched, expected)


def no_sync_verdicts(rank, world_size):
    from megapatch.patches.megatron.nested_no_sync import diagnose

    module = importlib.import_module("megatron.core.distributed.distributed_data_parallel")
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

    def takes_nothing(self): ...

    changes = {
        "repaired": (ddp, "no_sync", keeps_what_was),
        "no experts": (ddp, "no_sync", forgets_experts),
        "never ends": (ddp, "no_sync", never_ends),
        "other attributes": (ddp, "__init__", takes_nothing),
    }
    return verdicts_of(diagnose, module, changes)


def test_nested_no_sync():
    assert_verdicts(
        of_a_rank(no_sync_verdicts),
        {
            "as it is": ("needed", "ends the outer one"),
            "repaired": ("fixed", "stays in force"),
            "no experts": ("unknown", "expected no_sync() to clear is_last_microbatch"),
            "never ends": ("unknown", "after: cleared and cleared"),
            "other attributes": ("unknown", "expert_parallel_bucket_groups in megatron.core.distributed."),
        },
    )


def prepare_verdicts(rank, world_size):
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
        "other buffers": (module, "_ParamAndGradBuffer", None),
    }
    found = verdicts_of(diagnose, module, changes)
    restore("megatron.prepare-grads-once")
    return {**found, "restored": words(diagnose(module))}


def test_prepare_grads_once():
    (found,) = run_with_megatron(prepare_verdicts, 1)
    methods = "MixedPrecisionOptimizer.prepare_grads, MixedPrecisionOptimizer.step, ChainedOptimizer.step"
    assert_verdicts(
        found,
        {
            "as it is": ("needed", methods),
            "restored": ("needed", methods),
            "repaired": ("fixed", "not unscaled again"),
            "repaired in part": ("unknown", "1 with ChainedOptimizer.step"),
            "unscaled elsewhere": ("unknown", "0 with MixedPrecisionOptimizer.step"),
            "other buffers": ("unknown", "not found: megatron.core.optimizer:_ParamAndGradBuffer.reset"),
        },
    )


def train_verdicts(rank, world_size):
    from megapatch.patches.megatron.train_reentry import diagnose

    module = importlib.import_module("megatron.training.training")

    def another_train(model): ...

    changes = {"another train": (module, "train", another_train), "no timers": (module, "get_timers", GONE)}
    return verdicts_of(diagnose, module, changes)


@needs_training
def test_train_reentry():
    found = of_a_rank(train_verdicts)
    assert {case: kind for case, (kind, _) in found.items()} == {
        "as it is": "needed",
        "another train": "unknown",
        "no timers": "unknown",
    }
    for expected in ("parameter config of", 'the text "interval-time" in megatron.training.training:train'):
        assert expected in found["another train"][1]
    assert "megatron.training.training.get_timers" in found["no timers"][1]
