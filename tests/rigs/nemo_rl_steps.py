"""Steps of NeMo-RL's worker, whole and in slices, and how far two runs of them differ."""

from __future__ import annotations

import math

from megapatch.testing import tiny_gpt
from rigs.megatron import ADAM, BOTH, GRADS
from rigs.nemo_rl import GPT, batch, nll_loss, policy_gradient_loss, worker_for

STEPS, SIZE = 2, 8  # steps, and samples of a rank in each; two a microbatch
SLICES = {"one": (8,), "two": (4, 4), "four": (2, 2, 2, 2), "uneven": (2, 6)}
LAYOUTS = {
    "dp2": ({}, {}),
    "dp2, overlap": ({}, GRADS),
    "dp2, distributed optimizer": ({}, {**ADAM, "use_distributed_optimizer": True}),
    "dp2, distributed optimizer, both": ({}, BOTH),
    "pp2": ({"pp": 2}, {}),
}
LOSSES = {
    "nll": nll_loss,
    "policy gradient": policy_gradient_loss,
    "by sequences": lambda: policy_gradient_loss(
        token_level_loss=False,
        sequence_level_importance_ratios=True,
        truncated_importance_sampling_type="tis",
    ),
    "sequences out of bounds": lambda: policy_gradient_loss(truncated_importance_sampling_type="seq-mask-tis"),
}
SPLIT_KEYS = {"global_loss", "rank", "gpu_name", "model_dtype", "all_mb_metrics", "grad_norm"}


def whole(worker, step, loss):
    return worker.train(batch(step, SIZE), loss, gbs=SIZE * worker.dp_size)


def in_slices(sizes):
    def split(worker, step, loss):
        data, at = batch(step, SIZE), 0
        worker.begin_train_step(loss, gbs=SIZE * worker.dp_size)
        for size in sizes:
            assert worker.train_microbatch(data.slice(at, at + size)) is None
            at += size
        return worker.finish_train_step()

    return split


def trained(options, loss, take_step, before=lambda worker: None):
    """By step what is told, and the parameters in the end; `before` happens to the worker first."""
    model = tiny_gpt(**GPT, **options)
    worker = worker_for(model)
    config = dict(vars(model.config))
    before(worker)
    told = [take_step(worker, step, LOSSES[loss]()) for step in range(STEPS)]
    model.gather_parameters()
    if take_step is not whole:
        changed = {name for name, value in vars(model.config).items() if config.get(name) != value}
        assert changed <= {"param_sync_func"}  # by the first step, from v0.7.0 on, as in train()
    return told, model.parameters()


def differences(got, expected):
    """By what is told, and "parameters": the largest relative difference; "keys": what is told."""
    (steps, parameters), (expected_steps, expected_parameters) = got, expected
    found = {"keys": set(steps[0]), "parameters": 0.0}
    for name, value in expected_parameters.items():
        largest = float((parameters[name] - value).abs().max() / value.abs().max())
        found["parameters"] = max(found["parameters"], largest)
    for ours, theirs in zip(steps, expected_steps, strict=True):
        ours, theirs = summary(ours), summary(theirs)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            difference = abs(ours[name] - value) / max(abs(value), 1e-6)
            found[name] = max(found.get(name, 0.0), difference)
    return found


def summary(told):
    found = {"global_loss": float(told["global_loss"].sum()), "grad_norm": float(told["grad_norm"])}
    for name, values in told["all_mb_metrics"].items():
        values = [float(value) for value in values]
        combine = min if "_min" in name else max if "_max" in name else math.fsum
        found[name] = combine(values)
    return found
