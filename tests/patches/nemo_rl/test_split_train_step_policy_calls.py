"""nemo_rl.split-train-step-policy: which workers are called, with what, and whose answer counts, at 2 ranks.

Without a checkout it is our imitation of Policy.
"""

import contextlib
import importlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from rigs.cells import cells_of
from rigs.nemo_rl.policy import (
    OF_MAIN,
    POLICIES,
    find_policies,
    in_slices,
    loss,
    not_main,
    policy_for,
    put,
    samples,
    sliced,
    train_slice,
    whole,
)
from rigs.nemo_rl.steps import SIZE
from rigs.nemo_rl.worker import GPT

from megapatch._nemo_rl_split_step.policy import prepare_logprobs_from_meta
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = pytest.mark.thorough

LAYOUTS = {"dp2": {}, "pp2": {"pp": 2}}
MICROBATCHES = {
    "sequence_packing": {"enabled": True, "train_mb_tokens": 24, "algorithm": "concatenative"},
    "dynamic_batching": {"enabled": True, "train_mb_tokens": 24, "sequence_length_round": 4},
}
needs_data_plane = pytest.mark.skipif("TQPolicy" not in POLICIES, reason="this release has no data plane")


def called(rank, world_size):
    with contextlib.redirect_stdout(None):
        for layout, sizes in LAYOUTS.items():
            init_parallel(**sizes)
            for name in POLICIES:
                yield (name, layout), lambda name=name: all_answers(new_policy(name))
        init_parallel()
        for name in POLICIES:
            new = partial(new_policy, name)
            for section, settings in MICROBATCHES.items():
                yield (name, section), lambda new=new, which={section: settings}: given(new(which))
            yield (name, "error"), lambda new=new: after_an_error(new(), rank)
            yield (name, "default sizes"), lambda new=new: sizes_of(new())
            if not OF_MAIN:
                yield (name, "last"), lambda new=new: told_last(new())
        if not OF_MAIN:
            yield "buffers", lambda: told_to_keep(new_policy())
        if "TQPolicy" in POLICIES and not OF_MAIN:
            yield "logprobs", lambda: refreshed(new_policy("TQPolicy"))


def new_policy(name="Policy", settings=None):
    return policy_for(tiny_gpt(**GPT), name, settings)


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


def told_last(policy):
    """Return the workers' other arguments, for two slices."""
    told, worker = [], policy.worker_group.mine
    worker.train_microbatch = lambda data, **more: told.append(more)
    first, second = sliced(policy, samples(policy, 0, SIZE), (4, 4))
    policy.begin_train_step(loss())
    train_slice(policy)(first)
    train_slice(policy)(second, last=True)
    del worker.train_microbatch
    policy.abort_train_step()
    return told


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
    seen = [type(error_of(policy.begin_train_step, loss())).__name__]
    if rank == 1:
        worker.train_microbatch = _fail
    seen.append(str(error_of(train_slice(policy), second)))
    if rank == 1:
        del worker.train_microbatch
    seen.append(_open(policy))
    policy.abort_train_step()
    seen += [_open(policy), policy.flops_tracker.total_flops]
    policy.abort_train_step()  # nothing is open: nothing happens
    seen.append(type(error_of(policy.finish_train_step)).__name__)
    return seen, float(in_slices((4, 4))(policy, data)["grad_norm"])


def _fail(data):
    raise ArithmeticError("of one worker")


def _open(policy):
    """Of every worker, whether it has an open step."""
    found = [None] * 2
    torch.distributed.all_gather_object(found, policy.worker_group.mine._train_step_state is not None)
    return found


def error_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        return error
    return None


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


def refreshed(policy):
    """Of this rank's samples: what is in the data plane after each way of asking, and what the worker computes.

    The policy has been trained, and is no longer its reference."""
    in_slices((8,))(policy, samples(policy, 0, SIZE))
    data, worker = samples(policy, 1, SIZE), policy.worker_group.mine
    names = ("prev_logprobs", "reference_policy_logprobs")
    data = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict(
        {name: value for name, value in data.items() if name not in names}
    )
    mine = slice(SIZE * torch.distributed.get_rank(), SIZE * (torch.distributed.get_rank() + 1))
    shard = data.slice(mine.start, mine.stop)
    found = []
    for flags in ((False, False), (True, False), (False, True), (True, True)):
        meta = put(policy, data)
        arguments = dict(zip(("refresh_policy_logprobs", "refresh_reference_logprobs"), flags, strict=True))
        assert policy.prepare_logprobs_from_meta(meta, **arguments) is None
        rows = [policy.dp_client._partitions["train"].rows[one] for one in meta.sample_ids[mine]]
        found.append([[row.get(name) for row in rows] for name in names])
        policy.finish_step(meta)
    computed = (
        worker.get_logprobs(data=shard)["logprobs"],
        worker.get_reference_policy_logprobs(data=shard)["reference_logprobs"],
    )
    expected = [
        [row[:length] for row, length in zip(one, shard["input_lengths"].tolist(), strict=True)]
        for one in computed
    ]
    return found, expected


calls = cells_of(called, 2, setup=find_policies, timeout=580)


@pytest.mark.parametrize("name", POLICIES)
def test_twins_would_count_twice(calls, name):
    tq = name == "TQPolicy"
    for found in calls:
        assert found[name, "dp2"] == [(4, True if tq else None)] * 2
        assert found[name, "pp2"] == [(4, True if tq else None), (4, False if tq else None)]


@pytest.mark.parametrize("section", MICROBATCHES)
@pytest.mark.parametrize("name", POLICIES)
def test_slices_are_cut_into_microbatches_as_a_batch_is(calls, name, section):
    for found in calls:
        for whole_batch, slice_of_all in found[name, section]:
            assert slice_of_all == whole_batch
            (microbatches,), (tokens,) = whole_batch[1:]
            assert len(microbatches) == len(tokens) > 1


@pytest.mark.parametrize("name", POLICIES)
def test_an_error_of_one_worker_is_raised_and_abort_reaches_all(calls, name):
    for found in calls:
        seen, grad_norm = found[name, "error"]
        second_begin, raised, open_then, open_in_the_end, flops, finish = seen
        assert (raised, open_then, open_in_the_end) == ("of one worker", [True, True], [False, False])
        assert flops == 0
        if not OF_MAIN:
            assert (second_begin, finish) == ("MisuseError", "MisuseError")
        assert grad_norm == pytest.approx(calls[0][name, "error"][1])


@pytest.mark.parametrize("name", POLICIES)
def test_sizes_are_the_settings(calls, name):
    assert [found[name, "default sizes"] for found in calls] == [(8, 2)] * 2


@not_main
def test_workers_are_told_to_keep_their_buffers(calls):
    for found in calls:
        assert found["buffers"] == [[{}, {}, {"keep_train_buffers": True}, {"keep_train_buffers": True}]] * 2


@not_main
@needs_data_plane
def test_log_probabilities_are_refreshed_as_asked(calls):
    for found in calls:
        (neither, policy, reference, both), expected = found["logprobs"]
        nothing = [None] * SIZE
        for kinds, wanted in (
            (neither, (nothing, nothing)),
            (policy, (expected[0], nothing)),
            (reference, (nothing, expected[1])),
            (both, expected),
        ):
            for got, rows in zip(kinds, wanted, strict=True):
                assert len(got) == SIZE
                for one, row in zip(got, rows, strict=True):
                    if row is None:
                        assert one is None
                    else:
                        torch.testing.assert_close(one, row)
        assert not torch.equal(expected[0][0], expected[1][0])


@not_main
@pytest.mark.parametrize("name", POLICIES)
def test_workers_are_told_which_data_are_the_last(calls, name):
    assert [found[name, "last"] for found in calls] == [[{}, {"last": True}]] * 2


@pytest.mark.parametrize("asked", [[], ["policy"], ["reference"], ["policy", "reference"]])
def test_only_the_logprobs_that_are_asked_for_are_computed(asked):
    calls = []

    def computing(which):
        return lambda meta, micro_batch_size, timer: calls.append((which, meta, micro_batch_size, timer))

    policy = SimpleNamespace(
        get_logprobs_from_meta=computing("policy"), get_reference_policy_logprobs_from_meta=computing("reference")
    )
    which = {f"refresh_{name}_logprobs": True for name in asked}
    assert prepare_logprobs_from_meta(policy, "meta", **which, micro_batch_size=2, timer="timer") is None
    assert calls == [(name, "meta", 2, "timer") for name in asked]
