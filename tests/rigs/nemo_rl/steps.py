"""Steps of NeMo-RL's workers, whole and in slices, and how far two runs of them differ."""

import contextlib
import math

from megapatch.testing import init_parallel, tiny_gpt
from rigs.megatron.gathers import Collectives, wrong
from rigs.megatron.options import ADAM, BOTH, GRADS, buckets
from rigs.nemo_rl.worker import GPT, batch, nll_loss, policy_gradient_loss, worker_for

STEPS, SIZE = 2, 8  # steps, and samples of a rank in each; two a microbatch
# Samples of a rank in each slice; or a tuple of them, by rank.
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
        token_level_loss=False, sequence_level_importance_ratios=True, truncated_importance_sampling_type="tis"
    ),
}
SPLIT_KEYS = {"global_loss", "rank", "gpu_name", "model_dtype", "all_mb_metrics", "grad_norm"}


def samples(worker, step):
    """Return the step's samples of the worker's data-parallel rank."""
    rank = worker.dp_mesh.get_local_rank() if hasattr(worker, "dp_mesh") else None  # a DTensor worker's
    return batch(step, SIZE, rank)


def slices(worker, step, sizes):
    data, at = samples(worker, step), 0
    for size in sizes:
        size = size[worker.rank] if isinstance(size, tuple) else size
        yield data.slice(at, at + size)
        at += size


def whole(worker, step, loss):
    return worker.train(samples(worker, step), loss, gbs=SIZE * worker.dp_size)


def in_slices(sizes, prepare=lambda data: data, between=lambda worker: None):
    """Return a function that takes a step in slices; `between` is called with the worker after each."""

    def split(worker, step, loss):
        worker.begin_train_step(loss, gbs=SIZE * worker.dp_size)
        for data in slices(worker, step, sizes):
            assert worker.train_microbatch(prepare(data)) is None
            between(worker)
        return worker.finish_train_step()

    return split


def trained(worker, parameters, loss, take_step):
    """Return the reports of the steps, and `parameters()` in the end."""
    return [take_step(worker, step, LOSSES[loss]()) for step in range(STEPS)], parameters()


def trained_gpt(options, loss, take_step, before=lambda worker: None):
    """Return what `trained` does of Megatron's worker around a tiny GPT; call `before` with the worker first."""
    model = tiny_gpt(**GPT, **options)
    worker = worker_for(model)
    config = dict(vars(model.config))
    before(worker)

    def parameters():
        model.gather_parameters()
        return model.parameters()

    found = trained(worker, parameters, loss, take_step)
    if take_step is not whole:
        changed = {name for name, value in vars(model.config).items() if config.get(name) != value}
        assert changed <= {"param_sync_func"}  # by the first step, from v0.7.0 on, as in train()
    return found


def differences(got, expected, without=(), constant=()):
    """Return the largest relative difference by reported name, "parameters" among them, and the names as "keys".

    without    names that are not compared
    constant   metrics that must have one value in all microbatches
    """
    (steps, parameters), (expected_steps, expected_parameters) = got, expected
    found = {"keys": set(steps[0]), "parameters": 0.0}
    for name, value in expected_parameters.items():
        largest = float((parameters[name] - value).abs().max() / value.abs().max())
        found["parameters"] = max(found["parameters"], largest)
    for ours, theirs in zip(steps, expected_steps, strict=True):
        ours, theirs = summary(ours, constant), summary(theirs, constant)
        assert ours.keys() == theirs.keys()
        for name in theirs.keys() - set(without):
            difference = abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-6)
            found[name] = max(found.get(name, 0.0), difference)
    return found


def read_after_steps(read, plain, overlap, steps):
    """Return which fraction is wrong of what is read from `overlap`, by step; and the gathers, by bucket group."""
    fractions, size = [], 4
    with Collectives().counted() as counted:
        for step in range(steps):
            for worker in (plain, overlap):
                worker.train(batch(step, size), nll_loss(), gbs=size * worker.dp_size)
            fractions.append(wrong(read(overlap), read(plain)))
        overlap.get_logprobs(data=batch(steps, size))
    return fractions, counted.gathers / buckets(overlap.model)


def set_up(*layouts):
    """Set up these layouts in turn; yield the name and the model's options of each."""
    for layout in layouts:
        where, options = LAYOUTS[layout]
        init_parallel(**where)
        yield layout, options


def compared_after(layouts, ways, faults, before, good_steps=0):
    """Return the `differences` of steps after `before(fault)` from those of a worker without the fault.

    layouts      names of LAYOUTS
    ways         functions that take a step, by name
    good_steps   steps of both workers before all else
    """

    def after(fault):
        def prepare(worker):
            for step in range(good_steps):
                whole(worker, 5 + step, nll_loss())
            if fault is not None:
                before(fault)(worker)

        return prepare

    found = {}
    with contextlib.redirect_stdout(None):
        for layout, options in set_up(*layouts):
            for way, take_step in ways.items():
                expected = trained_gpt(options, "nll", take_step, before=after(None))
                for fault in faults:
                    got = trained_gpt(options, "nll", take_step, before=after(fault))
                    found[layout, fault, way] = differences(got, expected)
    return found


def assert_no_difference(ranks, cells, limit):
    """Check that each rank has so many `differences`, by cell, and that none is larger than the limit."""
    for found in ranks:
        assert len(found) == cells
        worst = {
            where: max(value for name, value in one.items() if name != "keys") for where, one in found.items()
        }
        assert {where: value for where, value in worst.items() if value > limit} == {}


def summary(told, constant=()):
    """Return one number for each reported name but is_oob_ratio, which releases leave out of a split step."""
    found = {"global_loss": float(told["global_loss"].sum()), "grad_norm": float(told["grad_norm"])}
    for name, values in told["all_mb_metrics"].items():
        if name == "is_oob_ratio":
            continue
        if name in constant:
            (found[name],) = set(values)
        else:
            combine = min if "_min" in name else max if "_max" in name else math.fsum
            found[name] = combine(float(value) for value in values)
    return found
