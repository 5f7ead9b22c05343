"""Verdicts on code that is like ms-swift's and yet another."""

from rigs.diagnosed_sources import each_source
from rigs.where import needs_torch

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
CHECK = "kwargs['check_for_nan_in_grad']"
ANOTHER = f"{CHECK} = not fp16"
ACCEPTS = "stat = -1.0 if stat is None else stat"
ASSERTS = "assert config.no_sync_func is None"
IN_TRAIN = "class BaseMegatronTrainer:\n    def train(self): self.config.no_sync_func = None"
SOURCES = {
    overflow_is_skipped.diagnose_check: {
        "check: always": (WRAP.format(body=f"{CHECK} = True"), "needed", "whatever the loss scale is"),
        "check: no fp16": (WRAP.format(body="pass").replace("fp16", "bf16"), "unknown", "fp16 in"),
        "check: no longer": (WRAP.format(body="pass"), "fixed", "leaves"),
        "check: another": (WRAP.format(body=ANOTHER), "unknown", "to set check_for_nan_in_grad to True"),
    },
    overflow_is_skipped.diagnose_step: {
        "step: makes a tensor of it": (STEP.format(body=TENSOR), "needed", "ends the job"),
        "step: no optimizer": (STEP.format(body=ACCEPTS).replace("optimizer", "gone"), "unknown", "optimizer in"),
        "step: accepts it": (STEP.format(body=f"{ACCEPTS}; {TENSOR}"), "fixed", "accepts None"),
        "step: another": (STEP.format(body="raise ValueError('no')"), "unknown", "ValueError: no"),
    },
    train_reentry.diagnose: {
        "setup: in train()": (IN_TRAIN, "unsupported", "train() sets the hooks itself"),
        "setup: nowhere": (IN_TRAIN.replace("no_sync_func", "gone"), "unknown", "no_sync_func in"),
        "setup: no hooks": (SETUP.format(body=SETS).replace("disable_forward_pre", "gone"), "unknown", "disable"),
        "setup: once": (SETUP.format(body=f"{ASSERTS}; {SETS}"), "needed", "fails at its second call"),
        "setup: again": (SETUP.format(body=SETS), "fixed", "can be called again"),
        "setup: sets nothing": (SETUP.format(body="config.no_sync_func"), "unknown", "to set no_sync_func"),
        "setup: asks for more": (SETUP.format(body=f"{SETS}; self.more()"), "unknown", "on a stand-in"),
    },
}
NAMES = {
    "check: always": "but kwargs",
    "step: makes a tensor of it": "BaseMegatronTrainer SimpleNamespace cuda item optimizer "
    "reduce_max_stat_across_model_parallel_group step torch train_step types",
    "setup: once": "but models no_sync overlap_param_gather",
}
test_the_verdict = needs_torch(each_source(SOURCES, NAMES))  # some of the code imports it
