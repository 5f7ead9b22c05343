"""nemo_rl.split-train-step-policy: NeMo-RL's own policies in slices against their train(), at 2 ranks.

Without a checkout it is our imitation of Policy.
"""

import contextlib
import sys
import types
from functools import partial

import pytest
from rigs.cells import cells_of, once
from rigs.imported import run_with_megatron
from rigs.nemo_rl.policy import OF_MAIN, POLICIES, find_policies, in_slices, not_main, policy_for, samples, whole
from rigs.nemo_rl.steps import SIZE, SLICES, STEPS, differences
from rigs.nemo_rl.worker import CHECKOUT, GPT, needs_nemo_rl

from megapatch.errors import MisuseError
from megapatch.patches.nemo_rl import split_train_step_policy
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = pytest.mark.thorough

LAYOUTS = {"dp2": {}, "pp2": {"pp": 2}}
CUTS = SLICES if CHECKOUT else {"uneven": SLICES["uneven"]}
DYNAMIC = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 24, "sequence_length_round": 4}}


def trained(name, take_step, settings=None):
    model = tiny_gpt(**GPT)
    policy = policy_for(model, name, settings)
    told = [take_step(policy, samples(policy, step, SIZE)) for step in range(STEPS)]
    return [{**one, "global_loss": one["loss"]} for one in told], model.parameters()


def lengths(told):
    return {name: len(values) for name, values in told["all_mb_metrics"].items()}


# ---------------------------------------------------------------- slices, and the whole
def compared(rank, world_size):
    with contextlib.redirect_stdout(None):
        for layout, sizes in LAYOUTS.items():
            init_parallel(**sizes)
            for name in POLICIES:
                expected = once(trained, name, whole)
                for cut, slices in CUTS.items():
                    yield (name, layout, cut), partial(cell, expected, name, in_slices(slices))
        init_parallel()
        for name in POLICIES:
            if CHECKOUT:  # the imitation's worker has no dynamic batching
                expected = once(trained, name, whole, DYNAMIC)
                yield (name, "dynamic batching"), partial(cell, expected, name, in_slices((2, 6)), DYNAMIC)
            if not OF_MAIN:
                expected, take_step = once(trained, name, whole), in_slices((4, 4), between=logprobs)
                yield (name, "logprobs between"), partial(cell, expected, name, take_step)


def cell(expected, name, take_step, settings=None):
    reference = expected()
    return compare(trained(name, take_step, settings), reference)


def compare(got, expected):
    ours, theirs = got[0][-1], expected[0][-1]
    others = ("total_flops", "num_ranks")
    return {
        "differences": differences(got, expected),
        "lengths": (lengths(ours), lengths(theirs)),
        "of train() alone": set(theirs) ^ set(ours),
        "others": ([ours[name] for name in others], [theirs[name] for name in others]),
    }


def logprobs(policy):
    """As main's controller has it, before a slice that needs them."""
    with pytest.raises(MisuseError, match="would free the gradients"):
        policy.prepare_for_lp_inference()
    policy.prepare_for_lp_inference(keep_train_buffers=True)
    policy.get_logprobs(samples(policy, 7, 2))
    policy.prepare_for_training()


ranks = cells_of(compared, 2, setup=find_policies, timeout=580)


def check(found, microbatches=None):
    told = found["differences"]
    told.pop("keys")
    assert {name: value for name, value in told.items() if not value <= 1e-5} == {}
    ours, theirs = found["lengths"]
    assert ours.keys() == theirs.keys()
    if microbatches:  # what is batched dynamically has others in slices
        assert ours == theirs == dict.fromkeys(theirs, microbatches)
    assert found["others"][0] == found["others"][1]
    assert found["of train() alone"] == set()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_in_slices_is_that_of_train(ranks, name, layout, cut):
    for found in ranks:
        # Two a microbatch; pipeline stages are twins, and the metrics of one of them count.
        check(found[name, layout, cut], microbatches={"dp2": 8, "pp2": 4}[layout])


@needs_nemo_rl
@pytest.mark.parametrize("name", POLICIES)
def test_slices_are_batched_dynamically(ranks, name):
    for found in ranks:
        check(found[name, "dynamic batching"])


@not_main
@pytest.mark.parametrize("name", POLICIES)
def test_log_probabilities_between_slices_leave_the_gradient(ranks, name):
    for found in ranks:
        check(found[name, "logprobs between"], microbatches=8)


# ---------------------------------------------------------------- without the patch
def lacked(rank, world_size):
    init_parallel()
    found = {}
    for name in POLICIES:
        policy = policy_for(tiny_gpt(**GPT), name)
        found[name] = [
            method
            for method in ("begin_train_step", "finish_train_step", "abort_train_step")
            if hasattr(policy, method)
        ]
    policy.worker_group.mine.prepare_for_lp_inference = lambda **ignored: None
    policy.prepare_for_lp_inference(keep_train_buffers=True)
    return found, policy.worker_group._workers[0].calls


@not_main
def test_without_the_patch_policies_train_whole_batches():
    ((found, calls),) = run_with_megatron(lacked, 1, setup=find_policies, env={"MEGAPATCH_DISABLE": "*"})
    assert found == {name: [] for name in POLICIES}
    assert calls == [("prepare_for_lp_inference", {})]


@pytest.mark.skipif(not OF_MAIN, reason="of main, which has it in TQPolicy")
def test_without_the_patch_mains_policy_trains_whole_batches():
    ((found, _),) = run_with_megatron(lacked, 1, setup=find_policies, env={"MEGAPATCH_DISABLE": "*"})
    assert found["Policy"] == []


# ---------------------------------------------------------------- code that is like NeMo-RL's and yet another
TWINS = '["context_parallel", "tensor_parallel", "pipeline_parallel"]'
INIT = """
    def __init__(self):
        self.cfg = self.worker_group = self.sharding_annotations = self.flops_tracker = None
        self.use_dynamic_batches = self.dynamic_batching_args = None
        self.use_sequence_packing = self.sequence_packing_args = None
"""
TRAIN = f"def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None, timer=None): return {TWINS}"
BEFORE = "    def prepare_for_lp_inference(self, *args, **kwargs): pass"
SINGLE = "    def run_all_workers_single_data(self, method): pass"
GROUP = """
class RayWorkerGroup:
    def run_all_workers_sharded_data(
        self, in_sharded_axes, replicate_on_axes, output_is_replicated, common_kwargs
    ): pass
"""


def policy(train=TRAIN, before=BEFORE, init=INIT, group=GROUP):
    return "\n".join(("class Policy:", init, before, SINGLE, f"    {train}", group))


CASES = {
    "none": ("policy", "there = 'nothing'", "unknown", "Policy"),
    "as known": ("policy", policy(), "needed", "only train()"),
    "to 0.5": ("policy", policy(TRAIN.replace(", timer=None", "")), "unsupported", "a fork"),
    "own": ("policy", f"{policy()}\nPolicy.begin_train_step = lambda self: 0", "fixed", "has begin_train_step"),
    "main": (
        "policy",
        policy(before=BEFORE.replace("*args", "keep_train_buffers=False")),
        "needed",
        "only train()",
    ),
    "an axis more": ("policy", policy(TRAIN.replace("[", '["expert_parallel", ')), "unknown", "context_parallel"),
    "other train": (
        "policy",
        policy("def train(self, data, timer=None): pass"),
        "unknown",
        "parameter loss_fn of",
    ),
    "no tracker": ("policy", policy(init=INIT.replace("flops_tracker", "flops")), "unknown", "flops_tracker in"),
    "other group": (
        "policy",
        policy(group=GROUP.replace("replicated", "same")),
        "unknown",
        "output_is_replicated",
    ),
    "tq: none": ("tq_policy", "there = 'nothing'", "unknown", "TQPolicy"),
    "tq: other": ("tq_policy", "class TQPolicy: pass", "unknown", "_stamp_pad_seqlen"),
    "mixin: none": ("mixin", "there = 'nothing'", "unknown", "TQWorkerMixin"),
    "mixin: other": ("mixin", "class TQWorkerMixin: pass", "unknown", "_fetch"),
    "mixin: own": (
        "mixin",
        "class TQWorkerMixin:\n    def begin_train_step_presharded(self): pass",
        "fixed",
        "has begin_train_step_presharded",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_diagnosis(case, monkeypatch):
    of, source, kind, reason = CASES[case]
    module = types.ModuleType("imitation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, vars(module))
    verdict = getattr(split_train_step_policy, f"diagnose_{of}")(module)
    assert (verdict.kind.value, reason in verdict.reason) == (kind, True), verdict
