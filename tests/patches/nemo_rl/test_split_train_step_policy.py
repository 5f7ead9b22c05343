"""nemo_rl.split-train-step-policy: NeMo-RL's own policies in slices against their train(), at 2 ranks.

And which workers are called, with what, and whose answer counts. Without a checkout it is our imitation of Policy.
"""

import contextlib
from functools import partial

import pytest
import torch
from rigs.cells import cells_of, once
from rigs.diagnosed_sources import assert_verdict_of_source
from rigs.imported import run_with_megatron
from rigs.megatron.options import attempt
from rigs.nemo_rl.policy import (
    OF_MAIN,
    POLICIES,
    find_policies,
    in_slices,
    loss,
    not_main,
    policy_for,
    samples,
    sliced,
    train_slice,
    whole,
)
from rigs.nemo_rl.steps import SIZE, SLICES, STEPS, differences
from rigs.nemo_rl.worker import CHECKOUT, GPT, needs_nemo_rl

from megapatch.errors import MisuseError
from megapatch.patches.nemo_rl import split_train_step_policy
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = pytest.mark.thorough

LAYOUTS = {"dp2": {}, "pp2": {"pp": 2}}
CUTS = SLICES if CHECKOUT else {"uneven": SLICES["uneven"]}
MICROBATCHES = {
    "sequence_packing": {"enabled": True, "train_mb_tokens": 24, "algorithm": "concatenative"},
    "dynamic_batching": {"enabled": True, "train_mb_tokens": 24, "sequence_length_round": 4},
}
DYNAMIC = {"dynamic_batching": MICROBATCHES["dynamic_batching"]}


def trained(name, take_step, settings=None):
    model = tiny_gpt(**GPT)
    policy = policy_for(model, name, settings)
    told = [take_step(policy, samples(policy, step, SIZE)) for step in range(STEPS)]
    return [{**one, "global_loss": one["loss"]} for one in told], model.parameters()


def lengths(told):
    """Return the number of each metric's values; releases leave is_oob_ratio out."""
    return {name: len(values) for name, values in told["all_mb_metrics"].items() if name != "is_oob_ratio"}


# ---------------------------------------------------------------- slices, and the whole
def compared(rank, world_size):
    with contextlib.redirect_stdout(None):
        for layout, sizes in LAYOUTS.items():
            init_parallel(**sizes)
            for name in POLICIES:
                expected = once(trained, name, whole)
                for cut, slices in CUTS.items():
                    yield (name, layout, cut), partial(cell, expected, name, in_slices(slices))
                yield (name, layout, "answers"), lambda name=name: all_answers(new_policy(name))
        init_parallel()
        for name in POLICIES:
            if CHECKOUT:  # the imitation's worker has no dynamic batching
                expected = once(trained, name, whole, DYNAMIC)
                yield (name, "dynamic batching"), partial(cell, expected, name, in_slices((2, 6)), DYNAMIC)
            if not OF_MAIN:
                expected, take_step = once(trained, name, whole), in_slices((4, 4), between=logprobs)
                yield (name, "logprobs between"), partial(cell, expected, name, take_step)
            new = partial(new_policy, name)
            for section, settings in MICROBATCHES.items():
                yield (name, section), lambda new=new, which={section: settings}: given(new(which))
            yield (name, "error"), lambda new=new: after_an_error(new(), rank)
            yield (name, "default sizes"), lambda new=new: sizes_of(new())
        if not OF_MAIN:
            yield "buffers", lambda: told_to_keep(new_policy())


def new_policy(name="Policy", settings=None):
    return policy_for(tiny_gpt(**GPT), name, settings)


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


# ---------------------------------------------------------------- calls of workers
def all_answers(policy):
    """The step's end as every worker tells it: how many losses, and whether it is a leader (the data plane's)."""
    data = samples(policy, 0, SIZE)
    policy.begin_train_step(loss(), gbs=data.size)
    for one in sliced(policy, data, (8,)):
        train_slice(policy)(one)
    finish = "finish_train_step_presharded" if hasattr(policy, "dp_client") else "finish_train_step"
    answers = policy.run_all_workers_single_data(finish)
    return [(len(one["all_mb_metrics"]["loss"]), one.get("is_replica_leader")) for one in answers]


def given(policy):
    """Return the workers' parts of a batch, whole and as one slice. (No CPU can train on packed sequences.)"""
    data, worker = samples(policy, 0, SIZE), policy.worker_group.mine
    told = {"global_loss": 0.0, "grad_norm": 0.0, "all_mb_metrics": {}, "gpu_name": "", "model_dtype": ""}
    worker.train = worker.train_presharded = lambda **ignored: told
    worker.train_microbatch = worker.train_microbatch_presharded = lambda **ignored: None
    whole(policy, data)
    for one in sliced(policy, data, (8,)):
        train_slice(policy)(one)
    return [[_content(call) for _, call in handle.calls] for handle in policy.worker_group._workers]


def _content(call):
    if "meta" in call:
        extra = dict(call["meta"].extra_info)
        indices = [extra.pop(name) for name in ("micro_batch_indices", "micro_batch_lengths")]
        return (call["meta"].sample_ids, call["meta"].fields, extra), *indices
    data = call["data"]
    return {key: data[key].tolist() for key in data}, data.micro_batch_indices, data.micro_batch_lengths


def after_an_error(policy, rank):
    """One of the workers fails in the second slice: what is raised, which steps are open, and the next step."""
    data, worker = samples(policy, 0, SIZE), policy.worker_group.mine
    policy.begin_train_step(loss(), gbs=data.size)
    first, second = sliced(policy, data, (4, 4))
    train_slice(policy)(first)
    seen = [attempt(policy.begin_train_step, loss())[0]]
    if rank == 1:
        worker.train_microbatch = _fail
    seen.append(attempt(train_slice(policy), second)[1])
    if rank == 1:
        del worker.train_microbatch
    seen.append(_open(policy))
    policy.abort_train_step()
    seen += [_open(policy), policy.flops_tracker.total_flops]
    policy.abort_train_step()  # nothing is open: nothing happens
    seen.append(attempt(policy.finish_train_step)[0])
    return seen, float(in_slices((4, 4))(policy, data)["grad_norm"])


def _fail(data):
    raise ArithmeticError("of one worker")


def _open(policy):
    """Of every worker, whether it has an open step."""
    found = [None] * 2
    torch.distributed.all_gather_object(found, policy.worker_group.mine._train_step_state is not None)
    return found


def sizes_of(policy):
    policy.worker_group.mine.begin_train_step = lambda **ignored: None
    policy.begin_train_step(None)
    (_, call) = policy.worker_group._workers[1].calls[-1]
    return call["gbs"], call["mbs"]


def told_to_keep(policy):
    policy.worker_group.mine.prepare_for_lp_inference = lambda **ignored: None
    policy.prepare_for_lp_inference()
    policy.prepare_for_lp_inference(False, ignored="by the original")
    policy.prepare_for_lp_inference(True)
    policy.prepare_for_lp_inference(keep_train_buffers=True)
    return [[call for _, call in handle.calls] for handle in policy.worker_group._workers]


ranks = cells_of(compared, 2, setup=find_policies)


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


@pytest.mark.parametrize("name", POLICIES)
def test_twins_would_count_twice(ranks, name):
    tq = name == "TQPolicy"
    for found in ranks:
        assert found[name, "dp2", "answers"] == [(4, True if tq else None)] * 2
        assert found[name, "pp2", "answers"] == [(4, True if tq else None), (4, False if tq else None)]


@pytest.mark.parametrize("section", MICROBATCHES)
@pytest.mark.parametrize("name", POLICIES)
def test_slices_are_cut_into_microbatches_as_a_batch_is(ranks, name, section):
    for found in ranks:
        for whole_batch, slice_of_all in found[name, section]:
            assert slice_of_all == whole_batch
            (microbatches,), (tokens,) = whole_batch[1:]
            assert len(microbatches) == len(tokens) > 1


@pytest.mark.parametrize("name", POLICIES)
def test_an_error_of_one_worker_is_raised_and_abort_reaches_all(ranks, name):
    for found in ranks:
        seen, grad_norm = found[name, "error"]
        second_begin, raised, open_then, open_in_the_end, flops, finish = seen
        assert (raised, open_then, open_in_the_end) == ("of one worker", [True, True], [False, False])
        assert flops == 0
        if not OF_MAIN:
            assert (second_begin, finish) == ("MisuseError", "MisuseError")
        assert grad_norm == pytest.approx(ranks[0][name, "error"][1])


@pytest.mark.parametrize("name", POLICIES)
def test_sizes_are_the_settings(ranks, name):
    assert [found[name, "default sizes"] for found in ranks] == [(8, 2)] * 2


@not_main
def test_workers_are_told_to_keep_their_buffers(ranks):
    for found in ranks:
        assert found["buffers"] == [[{}, {}, {"keep_train_buffers": True}, {"keep_train_buffers": True}]] * 2


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
LIKE = """
class Policy:
    def __init__(self):
        self.cfg = self.worker_group = self.sharding_annotations = self.flops_tracker = None
        self.use_dynamic_batches = self.dynamic_batching_args = None
        self.use_sequence_packing = self.sequence_packing_args = None
    def train(self, data, loss_fn, gbs=None, mbs=None{timer}):
        return ["context_parallel", "tensor_parallel", "pipeline_parallel"{axes}]
    def prepare_for_lp_inference(self, *args, **kwargs): ...
    def run_all_workers_single_data(self, method): ...
    {more}
class RayWorkerGroup:
    def run_all_workers_sharded_data(
        self, in_sharded_axes, replicate_on_axes, output_is_replicated, common_kwargs
    ): ...
"""
CASES = {
    "as known": ({}, "needed", "only train()"),
    "to 0.5": ({"timer": ""}, "unsupported", "a fork"),
    "own": ({"more": "def begin_train_step(self): ..."}, "fixed", "has begin_train_step"),
    "an axis more": ({"axes": ', "expert_parallel"'}, "unknown", "context_parallel"),
}


@pytest.mark.parametrize("case", CASES)
def test_diagnosis(case, modules):
    changed, kind, reason = CASES[case]
    source = LIKE.format(**{"timer": ", timer=None", "axes": "", "more": "", **changed})
    assert_verdict_of_source((split_train_step_policy.diagnose_policy, source, kind, reason), modules)
