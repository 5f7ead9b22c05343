"""nemo_rl.split-train-step where the model has losses of its own: a router's, multi-token prediction's."""

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

OTHERS = {"experts": (MOE, "moe_metrics"), "multi-token prediction": (MTP, "mtp_metrics")}


def compared(rank, world_size):
    worker = importlib.import_module(WORKER).MegatronPolicyWorkerImpl
    if has_own_split_step(worker):
        return None
    found = {}
    with contextlib.redirect_stdout(None):
        init_parallel()
        for name, (options, told) in OTHERS.items():
            runs = [trained_gpt(options, "nll", step) for step in (whole, in_slices(SLICES["uneven"]))]
            found[name] = differences(*reversed(runs))
            found[name].pop("keys")
            # In v0.6.0's train() what a router adds to the gradient is divided by nothing.
            if name == "experts" and not hasattr(worker, "_compute_moe_grad_scale"):
                first, ours = (summary(steps[0]) for steps, _ in runs)
                found[name] = {"first loss": abs(ours["global_loss"] - first["global_loss"])}
            for ours, theirs in zip(*(steps for steps, _ in reversed(runs)), strict=True):
                assert (told in ours) == (told in theirs)
                if "first loss" not in found[name]:
                    assert ours.get(told, {}) == pytest.approx(theirs.get(told, {}), rel=1e-5)
            one = worker_for(tiny_gpt(**GPT, **options))
            with pytest.raises(RuntimeError, match="by sequences, and the model has"):
                one.begin_train_step(policy_gradient_loss(token_level_loss=False))
            one.begin_train_step(nll_loss())
            one.abort_train_step()
    return found


def test_they_are_what_they_are_in_train():
    for found in run_with_megatron(compared, 2, setup=find_nemo_rl):
        if found is None:
            pytest.skip("the release has a step in slices of its own")
        worst = {name: max(one.values()) for name, one in found.items()}
        assert {name: value for name, value in worst.items() if value > 1e-5} == {}
