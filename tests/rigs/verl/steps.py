"""One optimizer step of verl's engine from several calls."""

import importlib

import torch

import megapatch
from rigs.megatron.gathers import wrong
from rigs.megatron.options import attempt
from rigs.verl.engine import GRADS, MICRO, batch_of, engine_of, loss, parameters, train

EXPECTED_TOKENS = 64
"""About those of a step: a power of two, by which a loss can be divided without rounding."""
SPLITS = ((4,), (1, 3), (2, 2), (1, 1, 1, 1))


def weighted(model_output, data, dp_group=None):
    """verl's own loss, which it divides by the tokens of the call, divided by those of a step instead."""
    found, metrics = loss()(model_output=model_output, data=data, dp_group=dp_group)
    return found * data["batch_num_tokens"] / EXPECTED_TOKENS, metrics


def parts_of(step, split):
    """Cut a rank's samples of a step as they would arrive."""
    tensors = importlib.import_module("verl.utils.tensordict_utils")
    whole, first = batch_of(step), 0
    for size in split:
        yield tensors.index_select_tensor_dict(whole, list(range(first, first + size)))
        first += size


def steps(split, **options):
    """Two steps, each split so, in the way of docs/verl.md; return norms, and the parameters after them."""
    engine = engine_of(**options)
    step = megapatch.TrainStep(engine.module, engine.optimizer, calls_add_up=True, expected_count=EXPECTED_TOKENS)
    norms = []
    for number in range(2):
        with engine.train_mode(), step:
            for part in parts_of(number, split):
                tokens = int(part["loss_mask"].values().sum())
                with step.accumulate(len(part) // MICRO, count=tokens):
                    engine.forward_backward_batch(part, weighted)
            step.reduce()
            norms.append(float(engine.optimizer_step()))
        engine.lr_scheduler_step()
    return norms, parameters(engine)


def whole_steps(**options):
    """The same two steps by verl's own train_batch()."""
    engine = engine_of(**options)
    norms = [train(engine, step).get("metrics", {}).get("grad_norm") for step in range(2)]
    return norms, parameters(engine)


def cut_without(**options):
    """The second of two calls, without TrainStep; return the failure, or the gradient's norm."""
    engine = engine_of(**options)
    with engine.train_mode():
        engine.optimizer_zero_grad()

        def calls():
            for part in parts_of(0, (2, 2)):
                engine.forward_backward_batch(part, weighted)
            return float(engine.optimizer_step())

        return attempt(calls)


LAYOUTS = {
    "data parallel": {"overlap": GRADS},
    "pipeline": {"pp": 2},
    "virtual": {"pp": 2, "vpp": 2, "overlap": GRADS},
}


def cells(rank, world_size):
    for name, layout in LAYOUTS.items():
        yield (name, "whole"), lambda layout=layout: whole_steps(**layout)
        for split in SPLITS:
            if name == "virtual" and any(size % 2 for size in split):
                continue  # Megatron's interleaved schedule takes multiples of the stages
            yield (name, split), lambda layout=layout, split=split: steps(split, **layout)
    yield "without", lambda: cut_without(overlap=GRADS)
    yield "failed", failed_call


def failed_call():
    """A call that fails leaves the next step, and the engine, as they would have been without it."""
    engine = engine_of(overlap=GRADS)
    step, hooks = megapatch.TrainStep(engine.module, engine.optimizer), engine.tf_config.no_sync_func
    (part,) = parts_of(0, (4,))
    part["temperature"] = torch.full((4,), float("nan"))

    def fail():
        with engine.train_mode(), step, step.accumulate(len(part) // MICRO):
            engine.forward_backward_batch(part, weighted)

    failure = attempt(fail)
    train(engine, 0)
    expected = engine_of(overlap=GRADS)
    train(expected, 0)
    return failure[0], engine.tf_config.no_sync_func is hooks, wrong(parameters(engine), parameters(expected))
