"""What the patches say of code that is like ROLL's and yet another."""

from __future__ import annotations

import importlib

import pytest

from megapatch.patches.roll import grad_scale, overflow_is_skipped

pytestmark = pytest.mark.thorough

STRATEGY = """
class MegatronTrainStrategy:
    def initialize(self, provider):
        self.model.config.finalize_model_grads_func = print
        self.models_wrapped, self.optimizer = provider(self.megatron_train_args.fp16)
        {hook}
    def train_step(self, batch, loss):
        successful, *_ = self.optimizer.step()
        if successful:
            self.scheduler.step()
        {otherwise}
"""
RAISES = "else: raise NotImplementedError"
CASES = {
    "scale: none": (grad_scale.diagnose, "there = 'nothing'", "absent", "no MegatronTrainStrategy"),
    "scale: unset": (grad_scale.diagnose, STRATEGY.format(hook="pass", otherwise=RAISES), "needed", "unset"),
    "scale: set": (
        grad_scale.diagnose,
        STRATEGY.format(hook="self.model.config.grad_scale_func = self.optimizer.scale_loss", otherwise=RAISES),
        "fixed",
        "sets grad_scale_func",
    ),
    "scale: elsewhere": (
        grad_scale.diagnose,
        "class MegatronTrainStrategy:\n    def initialize(self): ...",
        "unknown",
        "models_wrapped",
    ),
    "overflow: none": (overflow_is_skipped.diagnose, "there = 'nothing'", "absent", "no MegatronTrainStrategy"),
    "overflow: raises": (
        overflow_is_skipped.diagnose,
        STRATEGY.format(hook="pass", otherwise=RAISES),
        "needed",
        "ends the job",
    ),
    "overflow: accepted": (
        overflow_is_skipped.diagnose,
        STRATEGY.format(hook="pass", otherwise=""),
        "fixed",
        "accepts",
    ),
    "overflow: elsewhere": (
        overflow_is_skipped.diagnose,
        "class MegatronTrainStrategy:\n    def initialize(self): ...\n    def train_step(self): ...",
        "unknown",
        "scheduler",
    ),
}


@pytest.mark.parametrize(("diagnose", "source", "kind", "words"), CASES.values(), ids=CASES)
def test_the_verdict(diagnose, source, kind, words, modules):
    verdict = diagnose(importlib.import_module(modules.write(source)))
    assert verdict.kind.value == kind
    assert words in verdict.reason
