"""Verdicts of megatron.gathered-when-read on real code, changed code, and exporters."""

import importlib

from rigs.diagnosed_code import made_up, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts

from megapatch.patches.megatron import gathered_when_read as patch


def verdicts(rank, world_size):
    ddp = importlib.import_module("megatron.core.distributed")
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    chunk, group = ddp.DistributedDataParallel, ddp.param_and_grad_buffer._ParamAndGradBucketGroup

    def gathers(self, *args, **kwargs):
        self.disable_forward_pre_hook()
        return self.module.state_dict(*args, **kwargs)

    def another_step(self): ...

    changes = {
        "repaired in part": (chunk, "state_dict", gathers),
        "repaired": [(chunk, "state_dict", gathers), (chunk, "state_dict_for_save_checkpoint", gathers)],
        "other gathers": (group, "finish_param_sync", another_step),
    }
    of_optimizer = made_up(optimizer.DistributedOptimizer, "step_with_ready_grads", another_step)
    return (
        verdicts_of(patch.diagnose_ddp, ddp, changes),
        verdicts_of(patch.diagnose_optimizer, optimizer, of_optimizer),
    )


def test_megatron():
    found, found_of_optimizer = of_a_rank(verdicts)
    expected = {
        "as it is": ("needed", "read parameters that are not gathered"),
        "repaired in part": ("needed", ""),
        "repaired": ("fixed", "gather the parameters"),
        "other gathers": ("unknown", "parameter skip_next_bucket_dispatch of"),
    }
    assert_verdicts(found, expected)
    expected = {
        "as it is": ("needed", "a step leaves its parameters to be gathered"),
        "another_step": ("unknown", "overlap_param_gather in"),
    }
    assert_verdicts(found_of_optimizer, expected)
