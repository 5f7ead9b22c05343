"""What users pickle, copy and save after steps and loads has nothing of ours: no attribute, and no class."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.main_params import load_optimizer, load_weights, optimizer_state, weights
from rigs.megatron.options import BOTH, linear_schedule
from rigs.train_step.models import MEAN, in_pieces

from megapatch import TrainStep, report
from megapatch._mcore.bucket_groups import bucket_groups
from megapatch.testing import init_parallel, tiny_gpt

OURS = "megapatch"
CASES = {
    "bf16": {"dtype": "bf16", "lr": 0.05},
    "bf16 distributed, both overlaps": {**BOTH, "dtype": "bf16", "lr": 0.05},
    "fp16 experts": {"dtype": "fp16", "experts": 4},
}


def bytes_of(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def touched(model, scheduler):
    """By name, the objects that a step touches and whose attributes a user may save or copy."""
    yield "config", model.config
    yield "scheduler", scheduler
    yield "optimizer", model.optimizer
    yield "optimizer's config", model.optimizer.config
    for number, child in enumerate(model.optimizer.chained_optimizers):
        yield f"optimizer {number}", child
        yield f"inner optimizer {number}", child.optimizer
        yield f"loss scaler {number}", child.grad_scaler or model
    for number, chunk in enumerate(model.chunks):
        yield f"chunk {number}", chunk
        yield f"ddp_config {number}", chunk.ddp_config
        for name, module in chunk.named_modules():
            yield f"module {name}", module
        for name, parameter in chunk.named_parameters():
            yield f"parameter {name}", parameter
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield "buffer", buffer
            for bucket in buffer.buckets:
                yield "bucket", bucket
        for group in bucket_groups(chunk):
            yield "bucket group", group
    for group in model.optimizer.param_groups:
        for main in group["params"]:
            yield "main parameter", main


def copied(config):
    """Return a deep copy of a config without its functions, which refer to the whole model."""
    config = copy.copy(config)
    for name, value in vars(config).items():
        if callable(value) or isinstance(value, list) or name == "timers":
            setattr(config, name, None)
    return copy.deepcopy(config)


def attributes_of_ours(thing):
    """Names of ours among the attributes, and classes of ours among their values."""
    return sorted(
        name
        for name, value in vars(thing).items()
        if OURS in name or (type(value).__module__.startswith(OURS) and not name.startswith("__"))
    )


def saved(model, scheduler):
    """By name, the bytes of what a user may save."""
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            yield f"pickled parameter {name}", pickle.dumps(parameter)
    yield "optimizer", bytes_of(model.optimizer.state_dict())
    for child in model.optimizer.chained_optimizers:
        yield "optimizer's part", bytes_of(child.state_dict())
        yield "inner optimizer", bytes_of(child.optimizer.state_dict())
    yield "scheduler", pickle.dumps(scheduler.state_dict())


def kept(options):
    """Return what of ours is found, by moment and place: after steps, an evaluation, loads and a TrainStep."""
    model = tiny_gpt(**options)
    scheduler = linear_schedule(model.optimizer, steps=100, max_lr=0.05)
    found = {}

    def look(when):
        for place, thing in touched(model, scheduler):
            if hasattr(thing, "__dict__") and (names := attributes_of_ours(thing)):
                found[when, place] = names
        if names := attributes_of_ours(copied(model.config)):
            found[when, "copied config"] = names
        for place, data in saved(model, scheduler):
            if OURS.encode() in data:
                found[when, place] = data[max(0, data.index(OURS.encode()) - 20) :][:60]

    for step in range(2):
        model.train_step(step)
        scheduler.step(4)
    look("after steps")
    model.zero_grad()
    model.forward_backward(2)
    look("before the optimizer steps")
    model.optimizer.step()
    look("after the optimizer's step")
    model.forward_backward(3, forward_only=True)
    state, of_optimizer = weights(model), optimizer_state(model)
    load_weights(model, state)
    look("after a load of weights")
    if OURS.encode() in bytes_of(weights(model)):
        found["weights"] = OURS
    load_optimizer(model, of_optimizer)
    scheduler.load_state_dict(scheduler.state_dict())
    look("after a load")
    with TrainStep(model=model.chunks, optimizer=model.optimizer, scheduler=scheduler) as train_step:
        in_pieces(train_step, model, 4, (1, 1), MEAN)
        look("in a TrainStep")
        train_step.finish(increment=4)
    look("after a TrainStep")
    return found


def job(rank, world_size):
    for name, options in CASES.items():
        init_parallel(**({"ep": 2} if "experts" in name else {}))
        yield name, partial(kept, options)
    yield "patched", lambda: sum(patch.status.value == "applied" for patch in report().patches)


plain = cells_of(job, 2)
audited = cells_of(job, 2, audited=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("run", ["plain", "audited"])
def test_nothing_of_ours_is_in_what_users_keep(request, run, name):
    for rank in request.getfixturevalue(run):
        assert rank["patched"] > 10
        assert rank[name] == {}
