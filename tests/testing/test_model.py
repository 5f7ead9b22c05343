"""A TinyGPT's methods, besides training steps."""

from __future__ import annotations

import torch
from rigs.megatron.options import UNPATCHED

from megapatch.testing import init_parallel, mean_loss, run_ranks, tiny_gpt

HOOKS = ("grad_scale_func", "finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")


def gradients(rank, world_size):
    init_parallel()
    model = tiny_gpt()
    model.zero_grad()
    model.forward_backward(1, num_microbatches=4 // world_size)
    reduced = model.gradients()
    model.zero_grad()
    return reduced, model.gradients()


def test_gradients_are_the_reduced_ones():
    ((alone, _),) = run_ranks(gradients, 1, env=UNPATCHED)
    for reduced, zeroed in run_ranks(gradients, 2, env=UNPATCHED):
        assert reduced.keys() == alone.keys()
        for name, gradient in alone.items():
            torch.testing.assert_close(reduced[name], gradient, rtol=0, atol=1e-6)
            assert gradient.abs().sum() > 0
            assert zeroed[name].abs().sum() == 0


def ways_to_give_data(rank, world_size):
    init_parallel(pp=2, vpp=2)
    model = tiny_gpt(layers=4)
    losses = [
        model.forward_backward(3, num_microbatches=4, forward_only=True),
        model.forward_backward(microbatches=model.microbatches(3, 4), forward_only=True),
        model.forward_backward(
            data_iterators=[iter(model.microbatches(3, 4)) for _ in model.chunks],
            num_microbatches=4,
            forward_only=True,
        ),
        model.forward_backward(3, num_microbatches=4, seed=1, forward_only=True),
    ]
    return [mean_loss(metrics) for metrics in losses], [len(metrics) for metrics in losses]


def test_data_comes_by_step_as_microbatches_or_as_iterators():
    (first, on_first), (second, on_last) = run_ranks(ways_to_give_data, 2, env=UNPATCHED)
    assert first == second
    assert first[0] == first[1] == first[2] != first[3]
    assert on_first == [0] * 4
    assert on_last == [4] * 4


def hooks(rank, world_size):
    init_parallel()
    options = {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "align_param_gather": True,
        "use_distributed_optimizer": True,
        "optimizer": "adam",
    }
    return [
        [hook for hook in HOOKS if getattr(tiny_gpt(hooks=on, **options).config, hook) is not None]
        for on in (True, False)
    ]


def test_hooks_are_as_train_sets_them_or_unset():
    assert run_ranks(hooks, 1, env=UNPATCHED) == [[list(HOOKS), []]]


def process_groups_of_layouts(rank, world_size):
    found = []
    for _ in range(3):
        init_parallel(pp=2)
        tiny_gpt().train_step(0, num_microbatches=2)
        found.append(len(torch.distributed.distributed_c10d._world.pg_map))
    return found


def test_layouts_leave_no_process_groups_behind():
    for first, second, third in run_ranks(process_groups_of_layouts, 2, env=UNPATCHED):
        assert first == second == third
