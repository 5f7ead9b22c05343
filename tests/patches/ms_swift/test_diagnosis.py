"""What the patches say of code that is like ms-swift's and yet another."""

from __future__ import annotations

import importlib

import pytest
from rigs.needs import needs_torch

from megapatch.patches.ms_swift import overflow_is_skipped, train_reentry

WRAP = """
def wrap_model(args, models):
    kwargs = {{}}
    fp16 = args.fp16
    {body}
    ddp_config = dict(**kwargs)
    return [ddp_config]
"""
STEP = """
import torch
from types import SimpleNamespace as mpu
def reduce_max_stat_across_model_parallel_group(stat):
    {body}
    return stat.item()
class BaseMegatronTrainer:
    def train_step(self, iterator):
        successful, norm, _ = self.optimizer.step()
        return reduce_max_stat_across_model_parallel_group(norm)
"""
TENSOR = "stat = torch.tensor([stat], dtype=torch.float32, device=torch.cuda.current_device())"
SETUP = """
class DDP:
    def no_sync(self): ...
def disable_forward_pre_hook(models): ...
class BaseMegatronTrainer:
    def setup_model_training(self):
        config = self.config
        if isinstance(self.wrapped_models[0], DDP) and self.args.overlap_grad_reduce:
            {body}
        if self.args.overlap_param_gather:
            disable_forward_pre_hook(self.wrapped_models)
"""
SETS = "config.no_sync_func = self.wrapped_models[0].no_sync"
CASES = {
    "check: none": (overflow_is_skipped.diagnose_check, "there = 'nothing'", "unknown", "wrap_model"),
    "check: always": (
        overflow_is_skipped.diagnose_check,
        WRAP.format(body="kwargs['check_for_nan_in_grad'] = True"),
        "needed",
        "whatever the loss scale is",
    ),
    "check: no longer": (overflow_is_skipped.diagnose_check, WRAP.format(body="pass"), "fixed", "leaves"),
    "check: another": (
        overflow_is_skipped.diagnose_check,
        WRAP.format(body="kwargs['check_for_nan_in_grad'] = not fp16"),
        "unknown",
        "to set check_for_nan_in_grad to True",
    ),
    "step: none": (overflow_is_skipped.diagnose_step, "there = 'nothing'", "unknown", "train_step"),
    "step: makes a tensor of it": (
        overflow_is_skipped.diagnose_step,
        STEP.format(body=TENSOR),
        "needed",
        "ends the job",
    ),
    "step: accepts it": (
        overflow_is_skipped.diagnose_step,
        STEP.format(body=f"stat = -1.0 if stat is None else stat; {TENSOR}"),
        "fixed",
        "accepts None",
    ),
    "step: another": (
        overflow_is_skipped.diagnose_step,
        STEP.format(body="raise ValueError('no')"),
        "unknown",
        "ValueError: no",
    ),
    "setup: none": (train_reentry.diagnose, "there = 'nothing'", "absent", "no BaseMegatronTrainer"),
    "setup: in train()": (
        train_reentry.diagnose,
        "class BaseMegatronTrainer:\n    def train(self): self.config.no_sync_func = None",
        "unsupported",
        "train() sets the hooks itself",
    ),
    "setup: elsewhere": (
        train_reentry.diagnose,
        "class BaseMegatronTrainer:\n    def train(self): ...",
        "unknown",
        "no_sync_func",
    ),
    "setup: once": (
        train_reentry.diagnose,
        SETUP.format(body=f"assert config.no_sync_func is None; {SETS}"),
        "needed",
        "fails at its second call",
    ),
    "setup: again": (train_reentry.diagnose, SETUP.format(body=SETS), "fixed", "can be called again"),
    "setup: sets nothing": (
        train_reentry.diagnose,
        SETUP.format(body="config.no_sync_func"),
        "unknown",
        "to set no_sync_func",
    ),
    "setup: asks for more": (
        train_reentry.diagnose,
        SETUP.format(body=f"{SETS}; self.more()"),
        "unknown",
        "on a stand-in",
    ),
}


@needs_torch  # some of the code imports it
@pytest.mark.parametrize(("diagnose", "source", "kind", "words"), CASES.values(), ids=CASES)
def test_the_verdict(diagnose, source, kind, words, modules):
    verdict = diagnose(importlib.import_module(modules.write(source)))
    assert verdict.kind.value == kind
    assert words in verdict.reason
