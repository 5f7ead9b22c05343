"""Main parameters, weights and optimizer states of tiny models: copies, loads, and the steps between them."""

import copy
import itertools

import torch

from megapatch._verify.checks.loads import read_back
from megapatch.testing import tiny_gpt

SHARDING = {
    "get_parameter_state_dp_reshardable": "dp_reshardable",
    "get_parameter_state_fs_bucket_space": "fully_sharded_bucket_space",
}
MAINS = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups")


def children(model):
    return model.optimizer.chained_optimizers


def mains(model):
    """Copies of this rank's main parameters."""
    groups = [getattr(child, name, ()) for child in children(model) for name in MAINS]
    return [main.detach().clone() for main in itertools.chain(*itertools.chain(*groups))]


def weights(model):
    """Copies of the model's state, by chunk."""
    model.gather_parameters()
    return [
        {name: value.clone() if torch.is_tensor(value) else value for name, value in chunk.state_dict().items()}
        for chunk in model.chunks
    ]


def load_weights(model, state):
    for chunk, of_chunk in zip(model.chunks, state, strict=True):
        chunk.load_state_dict(of_chunk)


def restore_weights(model, state):
    """Load them as a checkpoint's, which dist_checkpointing.load() has read."""
    load_weights(model, read_back({"chunks": state})["chunks"])


def optimizer_state(model):
    """The optimizer's state, of distributed ones with what they save bucket by bucket, and Adam's step."""
    chained = model.optimizer.state_dict()
    states = chained if isinstance(chained, list) else [chained]
    steps = []
    for child, state in zip(children(model), states, strict=True):
        steps.append(next(iter(child.optimizer.state.values()), {}).get("step"))
        for name in ("get_parameter_state_dp_reshardable", "get_parameter_state_fs_bucket_space"):
            if hasattr(child, name):  # by its new and its old name
                state["param_state"] = getattr(child, name)()
                state["param_state_sharding_type"] = SHARDING[name]
                for tensors in _tensors_of_buckets(state["param_state"]):
                    tensors["padding"] = False
    return copy.deepcopy((chained, steps))


def _tensors_of_buckets(state):
    for by_dtype in (value for key, value in state.items() if isinstance(key, int)):
        yield from itertools.chain(*itertools.chain(*by_dtype.values()))


def load_optimizer(model, saved):
    state, steps = copy.deepcopy(saved)
    model.optimizer.load_state_dict(state)
    for child, step in zip(children(model), steps, strict=True):
        for moments in child.optimizer.state.values():
            if step is not None:  # the load gives all parameters of a distributed optimizer a single tensor
                moments["step"] = step.clone()


def train(model, *steps):
    for step in steps:
        model.train_step(step)
    model.gather_parameters()


def trained(options, *steps):
    model = tiny_gpt(**options)
    train(model, *steps)
    return model


def prepare(model):
    """Begin a step of the optimizer: a backward pass, and what it does before it steps."""
    model.zero_grad()
    model.forward_backward(9)
    model.optimizer.prepare_grads()


def forget_moments(model):
    for child in children(model):
        child.optimizer.state.clear()


def followed(model, *steps):
    """Main parameters and weights after these steps."""
    train(model, *steps)
    return mains(model), model.parameters()


def equal(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def same(found, expected):
    """Whether main parameters and weights are the same, to the last bit."""
    return equal(found[0], expected[0]) and equal(found[1].values(), expected[1].values())


def new_with(options, saved):
    new = tiny_gpt(**options)
    load_weights(new, saved)
    new.optimizer.reload_model_params()
    return new
