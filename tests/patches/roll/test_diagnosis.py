"""Verdicts on code that is like ROLL's and yet another."""

import pytest
from rigs.diagnosed_sources import each_source

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
SETS = "self.model.config.grad_scale_func = self.optimizer.scale_loss"
RAISES = "else: raise NotImplementedError"


def strategy(hook="pass", otherwise=RAISES):
    return STRATEGY.format(hook=hook, otherwise=otherwise)


SOURCES = {
    grad_scale.diagnose: {
        "scale: unset": (strategy(), "needed", "unset"),
        "scale: no gradients": (strategy().replace("finalize_model_grads_func", "gone"), "unknown", "finalize"),
        "scale: set": (strategy(hook=SETS), "fixed", "sets grad_scale_func"),
    },
    overflow_is_skipped.diagnose: {
        "overflow: raises": (strategy(), "needed", "ends the job"),
        "overflow: no fp16": (strategy().replace("fp16", "bf16"), "unknown", "fp16"),
        "overflow: accepted": (strategy(otherwise=""), "fixed", "accepts"),
    },
}
NAMES = {
    "scale: unset": "MegatronTrainStrategy finalize_model_grads_func initialize models_wrapped optimizer",
    "overflow: raises": "MegatronTrainStrategy fp16 initialize megatron_train_args models_wrapped optimizer "
    "scheduler step train_step",
}
test_the_verdict = each_source(SOURCES, NAMES)
