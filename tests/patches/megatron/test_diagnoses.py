"""What the diagnoses say of the real code, of repaired code, and of code that they do not know."""

from __future__ import annotations

import importlib
from unittest import mock

from megatron_rig import needs_training

from megapatch.patch import MARK
from megapatch.testing import run_ranks


def hook_verdicts(rank, world_size):
    from megapatch.patches.megatron.forward_pre_hook import diagnose

    module = importlib.import_module("megatron.core.distributed.distributed_data_parallel")
    group = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")._ParamAndGradBucketGroup
    ddp = module.DistributedDataParallel

    def verdict():
        found = diagnose(module)
        return found.kind.value, found.reason

    def works(self, param_sync=True): ...

    def takes_nothing(self): ...

    def needs_more(self):
        return self.something_new

    found = {"marked": hasattr(ddp.disable_forward_pre_hook, MARK), "as it is": verdict()}
    with mock.patch.object(ddp, "disable_forward_pre_hook", works):
        found["half repaired"] = verdict()
        with mock.patch.object(ddp, "enable_forward_pre_hook", works):
            found["repaired"] = verdict()
    changes = {
        "needs more": (ddp, "enable_forward_pre_hook", needs_more),
        "other signature": (group, "finish_param_sync", takes_nothing),
        "other attributes": (ddp, "__init__", takes_nothing),
        "no class": (module, "DistributedDataParallel", None),
    }
    for case, change in changes.items():
        with mock.patch.object(*change):
            found[case] = verdict()
    return found


def test_forward_pre_hook():
    unpatched = run_ranks(hook_verdicts, 1, env={"MEGAPATCH_DISABLE": "*"})[0]
    patched = run_ranks(hook_verdicts, 1)[0]
    assert (unpatched.pop("marked"), patched.pop("marked")) == (False, True)
    assert patched == unpatched  # a second look, through the patch, gives the same answers
    expected = {
        "as it is": (
            "needed",
            "disable_forward_pre_hook raises KeyError, enable_forward_pre_hook raises Assertion",
        ),
        "half repaired": ("needed", "disable_forward_pre_hook works, enable_forward_pre_hook raises Assertion"),
        "repaired": ("fixed", "can be called again"),
        "needs more": ("unknown", "something_new"),
        "other signature": ("unknown", "parameter 'skip_next_bucket_dispatch' of megatron.core.distributed."),
        "other attributes": ("unknown", "'expert_parallel_bucket_groups' in megatron.core.distributed."),
        "no class": ("unknown", "DistributedDataParallel.__init__"),
    }
    assert patched.keys() == expected.keys()
    for case, (kind, words) in expected.items():
        assert patched[case][0] == kind, case
        assert words in patched[case][1], case


def train_verdicts(rank, world_size):
    from megapatch.patches.megatron.train_reentry import diagnose

    module = importlib.import_module("megatron.training.training")
    verdicts = {"as it is": diagnose(module)}

    def another_train(model): ...

    with mock.patch.object(module, "train", another_train):
        verdicts["another train"] = diagnose(module)
    for case, name in {"no timers": "get_timers", "no train": "train"}.items():
        with mock.patch.dict(vars(module)):
            delattr(module, name)
            verdicts[case] = diagnose(module)
    return {case: (verdict.kind.value, verdict.reason) for case, verdict in verdicts.items()}


@needs_training
def test_train_reentry():
    unpatched, patched = run_ranks(train_verdicts, 1, env={"MEGAPATCH_DISABLE": "*"}), run_ranks(train_verdicts, 1)
    assert patched == unpatched
    (found,) = patched
    assert {case: kind for case, (kind, _) in found.items()} == {
        "as it is": "needed",
        "another train": "unknown",
        "no timers": "unknown",
        "no train": "absent",
    }
    for expected in ("parameter 'config' of", "'interval-time' in megatron.training.training:train"):
        assert expected in found["another train"][1]
    assert "megatron.training.training.get_timers" in found["no timers"][1]
