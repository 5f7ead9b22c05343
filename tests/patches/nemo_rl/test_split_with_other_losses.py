"""nemo_rl.split-train-step where a router has losses of its own; multi-token prediction is refused."""

import contextlib
import importlib

import pytest
from rigs.imported import run_with_megatron
from rigs.nemo_rl.steps import SLICES, differences, in_slices, summary, trained_gpt, whole
from rigs.nemo_rl.worker import CHECKOUT, GPT, WORKER, find_nemo_rl, nll_loss, policy_gradient_loss, worker_for
from rigs.train_step.models import MOE, MTP

from megapatch.patches.nemo_rl._workers import has_own_split_step
from megapatch.testing import init_parallel, tiny_gpt

# Its train() does what is compared with; our imitation's knows of no such loss.
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="NEMO_RL_CHECKOUT is not set")


def compared(rank, world_size):
    worker = importlib.import_module(WORKER).MegatronPolicyWorkerImpl
    if has_own_split_step(worker):
        return None
    with contextlib.redirect_stdout(None):
        init_parallel()
        whole_steps, split_steps = (trained_gpt(MOE, "nll", step) for step in (whole, in_slices(SLICES["uneven"])))
        found = differences(split_steps, whole_steps)
        found.pop("keys")
        # In v0.6.0's train() what a router adds to the gradient is divided by nothing.
        divided = hasattr(worker, "_compute_moe_grad_scale")
        if not divided:
            theirs, ours = (summary(steps[0]) for steps, _ in (whole_steps, split_steps))
            found = {"first loss": abs(ours["global_loss"] - theirs["global_loss"])}
        for ours, theirs in zip(split_steps[0], whole_steps[0], strict=True):
            assert ("moe_metrics" in ours) == ("moe_metrics" in theirs)
            if divided:
                assert ours.get("moe_metrics", {}) == pytest.approx(theirs.get("moe_metrics", {}), rel=1e-5)
        one = worker_for(tiny_gpt(**GPT, **MOE))
        with pytest.raises(RuntimeError, match="by sequences, and the model has"):
            one.begin_train_step(policy_gradient_loss(token_level_loss=False))
        with pytest.raises(RuntimeError, match="multi-token prediction"):
            worker_for(tiny_gpt(**GPT, **MTP)).begin_train_step(nll_loss())
    return found


def test_they_are_what_they_are_in_train():
    for found in run_with_megatron(compared, 2, setup=find_nemo_rl):
        if found is None:
            pytest.skip("the release has a step in slices of its own")
        assert {name: value for name, value in found.items() if value > 1e-5} == {}
