"""The functions of NeMo-RL's split train step that need no ranks: refusals, counts, divisors, arguments."""

import contextlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace as Bare

import pytest
import torch
from rigs.megatron.options import attempt

from megapatch.patches.nemo_rl import _workers
from megapatch.patches.nemo_rl._split_step import dtensor, fsdp2, megatron, policy, worker

BY_SEQUENCES = Bare(loss_type=Bare(name="SEQUENCE_LEVEL"))
BY_TOKENS = Bare(loss_type=Bare(name="TOKEN_LEVEL"))
BATCHES = Path(__file__).parents[2] / "imitations/nemo_rl/distributed/batched_data_dict.py"
BALANCED = {"num_moe_experts": 2, "moe_router_load_balancing_type": "aux_loss"}


# ---------------------------------------------------------------------------- refused, or not
def opened(kind, loss, config=None, **attributes):
    """Return what is said of a step of a worker that has only this; the last thing is that it has no cfg."""
    model = torch.nn.Module()
    model.config = Bare(**(config or {}))
    made = Bare(model=model, optimizer=None, scheduler=None, **attributes)
    return attempt(kind.begin_train_step, made, loss)[1]


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        (
            "the model has a router's z loss, which",
            (megatron, BY_SEQUENCES, {**BALANCED, "moe_z_loss_coeff": 0.1}),
        ),
        ("has no attribute 'cfg'", (megatron, BY_TOKENS, {**BALANCED, "moe_z_loss_coeff": 0.1})),
        ("has no attribute 'cfg'", (megatron, BY_SEQUENCES)),
        ("multi-token prediction", (megatron, BY_TOKENS, {"mtp_num_layers": 1})),
        ("positive_example_nll_weight", (megatron, Bare(positive_example_nll_weight=0.5))),
        ("has no attribute 'cfg'", (megatron, Bare(positive_example_nll_weight=0))),
    ],
)
def test_a_loss_that_cannot_be_divided_is_refused(said, arguments):
    assert said in opened(*arguments)


def test_what_calls_cannot_pass_on_is_refused():
    assert "replay the routing" in opened(megatron, BY_TOKENS, _router_replay_enabled=True)
    assert "expert parallel" in opened(dtensor, BY_TOKENS, moe_mesh="a mesh")
    assert "has no attribute 'cfg'" in opened(dtensor, BY_TOKENS, moe_mesh=None)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"moe_aux_loss_coeff": 0.1}, ["balancing"]),
        ({"moe_aux_loss_coeff": [0.0, 0.1]}, ["balancing"]),
        ({"moe_aux_loss_coeff": [0.0, 0.0]}, []),
        ({"moe_aux_loss_coeff": 0.0}, []),
        ({"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"}, []),
        ({"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "sinkhorn"}, []),
        ({"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}, ["balancing", "z loss"]),
        ({"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, "num_moe_experts": None}, []),
    ],
)
def test_losses_of_a_router(config, found):
    said = megatron._other_losses(Bare(config=Bare(**{**BALANCED, **config})))
    assert [part for part in ("balancing", "z loss") if part in said] == found


# ---------------------------------------------------------------------------- counted and divided
def test_what_counts():
    masks = {"sample_mask": torch.tensor([1.0, 0.0, 1.0]), "input_ids": torch.zeros(3, 4)}
    assert worker.valid_counts(masks) == (2, 2 * 4)
    token_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 1]])
    assert worker.valid_counts({**masks, "token_mask": token_mask}) == (2, 2 + 1)
    assert "no sample_mask" in attempt(worker.valid_counts, {})[1]


DECLARED = {"is_oob_ratio": Bare(name="TOKENS"), "mean": Bare(name="SEQUENCES"), "most": Bare(name="NONE")}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [  # each metric was divided by 64; 16 tokens and 4 sequences count
        (Bare(), {"loss": 4, "sampling_importance_ratio": 4, "own": 4}),
        (BY_TOKENS, {"loss": 4, "sampling_importance_ratio": 4}),
        (BY_SEQUENCES, {"loss": 16, "sampling_importance_ratio": 4}),
        (Bare(sequence_level_importance_ratios=True), {"loss": 4, "sampling_importance_ratio": 16}),
        (Bare(metric_normalizations=DECLARED), {"is_oob_ratio": 4, "mean": 16, "most": 1}),
    ],
)
def test_metrics_are_divided_by_what_counts(loss, expected):
    metrics = dict.fromkeys([*expected, "is_oob_ratio"], 1.0)
    found = worker.normalized(loss, metrics, expected_count=64, tokens=16, sequences=4)
    assert {name: found[name] for name in expected} == expected
    assert set(found) == set(expected)


@pytest.mark.parametrize(
    ("sizes", "expected"), [((None, None), (6, 3, 64)), ((13, None), (13, 3, 256)), ((4, 2), (4, 2, 64))]
)
def test_sizes_of_a_step_are_the_settings_and_its_divisor_a_power_of_two(sizes, expected):
    cfg = {"train_global_batch_size": 6, "train_micro_batch_size": 3, "max_total_sequence_length": 10}
    made, counts = Bare(cfg=cfg), []
    begun = Bare(begin=lambda: counts.append("begun"))
    worker.begin(worker.SplitStep, made, BY_TOKENS, *sizes, lambda count: counts.append(count) or begun)
    split = getattr(made, _workers.STATE)
    assert (split.gbs, split.mbs, split.expected_count) == expected
    assert counts == [expected[2], "begun"]
    assert (split.sequences, split.tokens, split.count_of(2, 3)) == (0, 0, 3)


# ---------------------------------------------------------------------------- of Megatron's worker
@pytest.mark.parametrize(
    ("experts", "microbatches", "scale"), [(None, 4, None), (1, 4, None), (2, 4, 0.25), (2, 0, 1.0)]
)
def test_metrics_of_experts_are_means_over_microbatches(experts, microbatches, scale):
    split = megatron.MegatronSplitStep(None, BY_TOKENS, 1, 1, 1.0, microbatches=microbatches)
    made = Bare(
        model=Bare(config=Bare(num_moe_experts=experts)), cfg={"megatron_cfg": {"moe_per_layer_logging": 7}}
    )
    found = split._expert_metrics(made, Bare(get_moe_metrics=lambda **given: given))
    assert found == ({"moe_metrics": {"loss_scale": scale, "per_layer_logging": 7}} if scale else {})
    assert split._expert_metrics(made, Bare(get_moe_metrics=lambda **given: {})) == {}


@pytest.mark.parametrize(
    ("count", "result", "norm", "called"),
    [
        (3.0, Bare(succeeded=True, grad_norm=2.0), 2.0, [("finish", 8), "hooks"]),
        (3.0, Bare(succeeded=False, grad_norm=None), 0.0, [("finish", 8)]),
        (0.0, None, 0.0, ["abort", ("schedule", 8)]),
    ],
)
def test_hooks_are_put_back_after_a_step_that_was_taken(monkeypatch, count, result, norm, called):
    calls = []
    monkeypatch.setattr(megatron, "put_hooks_back", lambda worker: calls.append("hooks"))
    step = Bare(
        finish=lambda increment: calls.append(("finish", increment)) or result, abort=lambda: calls.append("abort")
    )
    scheduler = Bare(step=lambda increment: calls.append(("schedule", increment)))
    split = megatron.MegatronSplitStep(step, BY_TOKENS, gbs=8, mbs=1, expected_count=1.0)
    assert (split._step(Bare(scheduler=scheduler), count), calls) == (norm, called)


@pytest.mark.parametrize("draft", [None, {"enabled": True}, {"enabled": False}])
def test_what_train_would_pass_on(draft):
    cfg = {"megatron_cfg": {"use_linear_ce_fusion_loss": 1}, **({"draft": draft} if draft else {})}
    made = Bare(
        cfg=cfg, model="model", mcore_state=Bare(straggler_timer="timer"), draft_model=2, defer_fp32_logits=3
    )
    assert megatron._of_worker(made) == {
        "cfg": cfg,
        "model": "model",
        "straggler_timer": "timer",
        "enable_hidden_capture": draft == {"enabled": True},
        "use_linear_ce_fusion_loss": 1,
        "use_fused_linear_logprobs": False,
        "draft_model": 2,
        "defer_fp32_logits": 3,
    }


# ---------------------------------------------------------------------------- of DTensor workers
@pytest.mark.parametrize("indices", [None, [], [[[0, 1]], [[1, 2]]]])
def test_bins_of_no_step_or_of_two_are_refused(indices):
    made = Bare(cfg={"dynamic_batching": {"enabled": True}}, enable_seq_packing=False)
    assert "makes for one step" in attempt(dtensor._bins, made, Bare(micro_batch_indices=indices))[1]


class Kept:
    """Keep the names of methods that are called."""

    def __init__(self, **attributes):
        self.calls = []
        vars(self).update(attributes)

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append(name) or name


def test_train_has_an_optimizer_that_does_nothing_and_then_one_that_only_steps():
    groups = [{"params": [torch.zeros(1, requires_grad=True) for _ in range(2)], "lr": 0.5}]
    optimizer = Kept(param_groups=groups)
    idle = dtensor.IdleOptimizer(optimizer)
    assert (idle.zero_grad(set_to_none=True), idle.step(), idle.param_groups) == (None, None, groups)
    only = dtensor.OptimizerStepOnly(optimizer, expects_gradients=True)
    assert (only.zero_grad(), optimizer.calls) == (None, [])
    assert "dropped the gradients" in attempt(only.step)[1]
    assert (only.stepped, optimizer.calls) == (False, [])
    groups[0]["params"][1].grad = torch.ones(1)
    assert (only.step(), only.zero_grad(), optimizer.calls) == ("step", None, ["step", "zero_grad"])
    assert only.param_groups is groups
    groups[0]["params"][1].grad = None
    assert dtensor.OptimizerStepOnly(optimizer, expects_gradients=False).step() == "step"


def test_a_loss_divides_by_what_is_expected_and_goes_backward_by_the_step():
    def loss_fn(logits, global_valid_seqs, global_valid_toks):
        return logits.sum() / global_valid_toks, {"loss": float(global_valid_seqs)}

    loss_fn.loss_type, found = "by tokens", []
    split = dtensor.SplitLoss(loss_fn, 64.0, found.append)
    assert split.loss_type == "by tokens"
    counted = {"global_valid_seqs": torch.tensor(3.0), "global_valid_toks": torch.tensor(5.0)}
    loss, metrics = split(torch.ones(4), **counted)
    assert (float(loss), metrics) == (4 / 64, {"loss": 64.0})
    (loss * 2 + 0 * loss).backward()
    assert (type(found[0]), float(found[0])) == (torch.Tensor, 8 / 64)


def test_what_a_worker_lacks_is_not_replaced_and_its_timer_is_another():
    made, timer = Bare(optimizer=1, timer=Kept()), None
    timer = made.timer
    with dtensor._replaced(made, optimizer=2, moe_mesh=3):
        assert (made.optimizer, hasattr(made, "moe_mesh"), type(made.timer)) == (2, False, Kept)
        assert made.timer is not timer
    assert (made.optimizer, made.timer) == (1, timer)


@pytest.mark.parametrize("loss", [Bare(), Bare(metric_normalizations=DECLARED)])
def test_metrics_of_microbatches_are_corrected(loss):
    split = dtensor.DTensorSplitStep(None, loss, 1, 1, 64.0)
    split.metrics = {"lr": [0.5], "global_valid_seqs": [64] * 2, "global_valid_toks": [64], "is_oob_ratio": [1.0]}
    oob = {"is_oob_ratio": [4]} if hasattr(loss, "metric_normalizations") else {}
    expected = {"lr": [0.5], "global_valid_seqs": [4] * 2, "global_valid_toks": [16], **oob}
    assert split._corrected(tokens=16, sequences=4) == expected


def samples(size):
    spec = importlib.util.spec_from_file_location("bare_batches", BATCHES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = torch.arange(1, size + 1)
    tokens = rows[:, None] * torch.ones(3)
    return module.BatchedDataDict(input_ids=tokens, token_mask=tokens, sample_mask=rows.float(), other=rows)


@pytest.mark.parametrize(("passes", "more"), [(2, []), (3, [1, 1])])
def test_samples_are_repeated_until_all_ranks_have_as_many_passes(passes, more):
    data = samples(4)
    found = dtensor._padded(data, None, 2, passes)
    assert found is not data
    assert (found["other"].tolist(), found["sample_mask"].tolist()) == (
        [1, 2, 3, 4, *more],
        [1, 2, 3, 4, *[0] * len(more)],
    )
    assert data["sample_mask"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("missing", [0, 2])
def test_bins_are_repeated_likewise(missing):
    data = samples(5)
    data.micro_batch_lengths = [[7, 8]]
    found = dtensor._padded(data, [[0, 2], [2, 5]], 2, 2 + missing)
    assert found["other"].tolist() == [1, 2, 3, 4, 5, *[1, 2] * missing]
    assert found.micro_batch_indices == [[[0, 2], [2, 5], *[[5, 7], [7, 9]][:missing]]]
    assert found.micro_batch_lengths == [[7, 8, *[7] * missing]]
    assert found.elem_counts_per_gb == [5 + 2 * missing]


def test_a_batch_without_a_microbatch_has_a_row():
    found = dtensor._empty_batch(samples(2))
    row = {"input_ids": [[1] * 3], "sample_mask": [1], "token_mask": [[1] * 3]}
    assert {name: values.tolist() for name, values in found.items()} == row
    assert (found.micro_batch_indices, found.micro_batch_lengths, found.elem_counts_per_gb) == ([[]], [[0]], [0])


# ---------------------------------------------------------------------------- FSDP2's
def test_losses_after_a_ranks_own_microbatches_do_not_count():
    weight, backward = torch.ones(1, requires_grad=True), fsdp2.Backward(2, 3)
    for _ in range(3):
        backward(weight * 2)
    assert (weight.grad.tolist(), backward.made) == ([4], 3)


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("method", ["reset_iter_state", None])
def test_a_step_that_is_given_up_leaves_no_pass_half_done(method, root):
    """Before torch 2.13 there is no method for it."""
    context = Bare(iter_forward_root="a module")
    state = Kept(_state_ctx=context, _is_root=root)
    layer = Bare(reshard=lambda: calls.append("reshard"))
    parameter = torch.ones(1, requires_grad=True)
    others = torch.ones(1, requires_grad=True)
    calls, gathered = [], torch.ones(1, requires_grad=True)
    model = Bare(
        parameters=lambda: [gathered],
        modules=lambda: [layer, Bare()],
        _get_fsdp_state=lambda: state,
        set_requires_gradient_sync=lambda on: calls.append(("reduce", on)),
        set_is_last_backward=lambda on: calls.append(("last", on)),
        **({method: lambda: calls.append(method)} if method else {}),
    )
    optimizer = Bare(zero_grad=lambda: calls.append("zero"), param_groups=[{"params": [others, parameter]}])
    mesh = Bare(get_group=lambda: None)
    step = fsdp2.FSDP2Step(Bare(model=model, optimizer=optimizer, dp_mesh=mesh))
    step.begin()
    parameter.grad, gathered.grad = torch.ones(1), torch.ones(1)
    step.end(0.5)
    assert (calls, parameter.grad.tolist()) == ([("reduce", True), ("last", True), "zero", "reshard"], [0.5])
    calls.clear()
    step.abort()
    assert gathered.grad is None
    assert calls == ["zero", *([method] if root and method else [])]  # without a forward pass there is no root
    by_hand = root and not method
    assert state.calls == (["_root_post_backward_final_callback"] if by_hand else [])
    assert context.iter_forward_root == (None if by_hand else "a module")


# ---------------------------------------------------------------------------- of the driver
class Timer:
    def __init__(self):
        self.labels = []

    @contextlib.contextmanager
    def time(self, label):
        self.labels.append(label)
        yield


class Group:
    """Keep the calls of all workers; the answers are those of two data-parallel ranks."""

    cluster = Bare(world_size=lambda: 8)

    def __init__(self, *answers):
        self.calls, self.answers = [], list(answers)

    def run_all_workers_sharded_data(
        self, method, in_sharded_axes, replicate_on_axes, output_is_replicated, **given
    ):
        assert (in_sharded_axes, replicate_on_axes) == (["data_parallel"], list(_workers.TWINS))
        assert output_is_replicated == list(_workers.TWINS)
        self.calls.append((method, given))
        return self.answers

    def get_all_worker_results(self, futures):
        return futures


def driver(*answers, **attributes):
    axes = Bare(get_axis_size={"data_parallel": 2}.__getitem__)
    return Bare(worker_group=Group(*answers), sharding_annotations=axes, flops_tracker=None, **attributes)


def test_workers_of_the_data_plane_fetch_what_the_driver_names(monkeypatch):
    kept, shards = {}, [Bare(sequence_lengths=(3, 5)), Bare(sequence_lengths=(7,))]
    nemo = Bare(
        DP_TRAIN_FIELDS=("ids",),
        fields_with_optional_routed_experts=lambda fields, enabled: [*fields, enabled],
        shard_meta_for_dp=lambda meta, **given: (kept.update(given, meta=meta) or shards, None),
    )
    monkeypatch.setitem(policy.sys.modules, policy.TQ_MODULE, nemo)
    monkeypatch.setattr(policy.dataclasses, "replace", lambda meta, **changed: {meta: changed})
    stamped, tracked, timer = [], [], Timer()
    made = driver(
        _stamp_pad_seqlen=stamped.append,
        _packing_args=lambda key: (f"packing {key}", f"dynamic {key}"),
        _router_replay_enabled="routed",
    )
    made.flops_tracker = Bare(track_batch=tracked.append)
    policy.train_microbatches_from_meta(made, "meta", timer)
    assert kept == {
        "meta": {"meta": {"fields": ["ids", "routed"], "task_name": "train"}},
        "dp_world": 2,
        "batch_size": None,
        "sequence_packing_args": "packing train_mb_tokens",
        "dynamic_batching_args": "dynamic train_mb_tokens",
    }
    assert (stamped, tracked) == (["meta"], [[3, 5], [7]])
    assert made.worker_group.calls == [("train_microbatch_presharded", {"meta": shards})]
    assert timer.labels == ["policy_training/shard_meta", "policy_training/submit_microbatch_futures"]


def test_workers_get_their_parts_and_the_tracker_counts_lengths():
    shards = [{"input_lengths": torch.tensor([3, 5])}, {"input_lengths": torch.tensor([7])}]
    made, tracked, timer = driver(use_dynamic_batches=False, use_sequence_packing=False), [], Timer()
    data = Bare(shard_by_batch_size=lambda ranks: shards)
    policy.train_microbatches(made, data)
    made.flops_tracker = Bare(track_batch=tracked.append)
    policy.train_microbatches(made, data, timer)
    assert tracked == [[3, 5], [7]]
    assert made.worker_group.calls == [("train_microbatch", {"data": shards})] * 2
    assert timer.labels == ["policy_training/sharding_data", "policy_training/submit_microbatch_futures"]


def test_the_drivers_result_is_that_of_all_ranks():
    first = {"global_loss": 1, "grad_norm": 2, "all_mb_metrics": {"loss": [3, 4]}}
    second = {"global_loss": 5, "grad_norm": 6, "all_mb_metrics": {"loss": [7], "more": [8]}}
    expected = {"loss": 1, "grad_norm": 2, "all_mb_metrics": {"loss": [3, 4, 7], "more": [8]}}
    assert policy.finish_train_step(driver(first, second)) == expected
    made = driver({**first, "moe_metrics": 9}, {**second, "moe_metrics": 10}, dp_client=None)
    made.flops_tracker = Bare(total_flops=11)
    more = {"moe_metrics": 9, "total_flops": 11, "num_ranks": 8}
    assert policy.finish_train_step(made) == {**expected, **more}
    assert made.worker_group.calls == [("finish_train_step_presharded", {})]


def test_the_driver_passes_on_sizes_and_counts_from_the_step_on():
    made, resets = driver(cfg={"train_global_batch_size": 6, "train_micro_batch_size": 3}), []
    policy.begin_train_step(made, "loss")
    policy.abort_train_step(made)
    made.flops_tracker, made.dp_client = Bare(reset=lambda: resets.append(len(made.worker_group.calls))), None
    policy.begin_train_step(made, "loss", gbs=4, mbs=2)
    policy.abort_train_step(made)
    assert made.worker_group.calls == [
        ("begin_train_step", {"common_kwargs": {"loss_fn": "loss", "gbs": 6, "mbs": 3}}),
        ("abort_train_step", {}),
        ("begin_train_step_presharded", {"common_kwargs": {"loss_fn": "loss", "gbs": 4, "mbs": 2}}),
        ("abort_train_step_presharded", {}),
    ]
    assert resets == [3, 4]


@pytest.mark.parametrize("section", [None, "dynamic_batching", "sequence_packing"])
def test_the_driver_cuts_data_as_for_train(section):
    data = Bare(shard_by_batch_size=lambda ranks, **given: ([(ranks, given)], None) if given else [ranks])
    cfg = {name: {"train_mb_tokens": name} for name in ("dynamic_batching", "sequence_packing")}
    made = driver(
        cfg=cfg,
        use_dynamic_batches=section == "dynamic_batching",
        use_sequence_packing=section == "sequence_packing",
        dynamic_batching_args={"max_tokens_per_microbatch": 0, "of": "dynamic"},
        sequence_packing_args={"max_tokens_per_microbatch": 0, "of": "packing"},
    )
    (found,) = policy._sharded(made, data)
    if section is None:
        assert found == 2
    else:
        arguments = {
            "max_tokens_per_microbatch": section,
            "of": section.split("_")[0].replace("sequence", "packing"),
        }
        assert found == (2, {f"{section}_args": arguments})


# ---------------------------------------------------------------------------- of workers of the data plane
def test_workers_of_the_data_plane_train_on_what_they_fetch():
    calls = []
    made = Bare(
        begin_train_step=lambda **given: calls.append(given),
        train_microbatch=lambda **given: calls.append(given),
        finish_train_step=lambda: {"global_loss": 1},
        abort_train_step=lambda: calls.append("abort"),
        _fetch=lambda meta: f"data of {meta}",
        _attach_or_repack_pack_metadata=lambda data, meta: f"{data}, packed by {meta}",
        _is_replica_leader=list,
    )
    worker.begin_train_step_presharded(made, "loss", 4, 2)
    worker.train_microbatch_presharded(made, "meta")
    assert worker.finish_train_step_presharded(made) == {"global_loss": 1, "is_replica_leader": False}
    worker.abort_train_step_presharded(made)
    expected = {"loss_fn": "loss", "gbs": 4, "mbs": 2}
    assert calls == [expected, {"data": "data of meta, packed by meta"}, "abort"]
