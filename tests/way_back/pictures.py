"""Everything that a step reads or leaves, as numbers, and where two of these pictures differ."""

from __future__ import annotations

import importlib

import torch

from . import streams


def parts_of(optimizer):
    """Return the optimizers of a chained one."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def picture(trainer):
    """Return what a rank holds after a step, by (kind, name)."""
    model, found = trainer.model, {}
    model.gather_parameters()
    for name, value in model.parameters().items():
        found["weights", name] = value
    for number, part in enumerate(parts_of(model.optimizer)):
        _of_optimizer(found, number, part)
    for chunk in model.chunks:
        for name, buffer in chunk.named_buffers():
            if "expert_bias" in name:
                found["expert bias", name] = buffer.detach().clone()
    if trainer.layout.is_random:
        for name, state in streams.take().items():
            found["random streams", name] = state.float()
    found["schedule", "steps"] = float(trainer.schedule.num_steps)
    return found


def _of_optimizer(found, number, part):
    for index, group in enumerate(part.optimizer.param_groups):
        where = f"{number}.{index}"
        for kind, name in (("learning rate", "lr"), ("weight decay", "weight_decay")):
            found[kind, where] = float(group[name])
        for place, parameter in enumerate(group["params"]):
            found["main parameters", f"{where}.{place}"] = parameter.detach().float().clone()
            for name, value in part.optimizer.state.get(parameter, {}).items():
                if name == "padding":  # with which a load of 0.16 leaves the offloaded optimizer: nothing reads it
                    continue
                kind = {"step": "Adam's step", "master_param": "main parameters"}.get(name, "moments")
                found[kind, f"{where}.{place}.{name}"] = torch.as_tensor(value).detach().float().clone()
    if getattr(part, "grad_scaler", None):
        for name, value in part.grad_scaler.state_dict().items():
            found["loss scale", f"{number}.{name}"] = float(value)


def take_logged():
    """Return the losses of the model's own that Megatron keeps for the log, and clear them as it does."""
    found = {}
    for name, values in _logged().items():
        found["logged", name] = values.detach().clone()
        values.zero_()
    return found


def _logged():
    try:
        module = importlib.import_module("megatron.core.transformer.moe.moe_logging")  # from 0.18 on
    except ImportError:
        module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        if not hasattr(module, "get_moe_layer_wise_logging_tracker"):  # in 0.12
            module = importlib.import_module("megatron.core.parallel_state")
        return {name: entry["values"] for name, entry in module.get_moe_layer_wise_logging_tracker().items()}
    return {name: entry.values for name, entry in module.get_moe_metrics_tracker().metrics.items()}


def differences(found, expected):
    """Return, by kind, how many of its values differ, and by how much at most.

    Values are equal if they have the same bits; nan equals nan.
    """
    different = {}
    for key in sorted({*found, *expected}):
        one, other = found.get(key), expected.get(key)
        if key[0] == "logged":  # a loss that was never logged is one of 0
            one, other = (
                torch.zeros_like(value) if mine is None else mine for mine, value in ((one, other), (other, one))
            )
        if one is None or other is None:
            different.setdefault(key[0], []).append((key[1], "only in one of both"))
            continue
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        if one.shape != other.shape or not bool(((one == other) | (one.isnan() & other.isnan())).all()):
            off = (one - other).abs().max().item() if one.shape == other.shape else "another shape"
            different.setdefault(key[0], []).append((key[1], off))
    return {kind: _in_words(places, found, expected, kind) for kind, places in different.items()}


def _in_words(places, found, expected, kind):
    name, off = max(places, key=lambda place: place[1] if isinstance(place[1], float) else float("inf"))
    one, other = found.get((kind, name)), expected.get((kind, name))
    if isinstance(one, float) and isinstance(other, float):
        off = f"{one:.6g} instead of {other:.6g}"
    elif isinstance(off, float):
        off = f"off by {off:.3g}"
    total = sum(key[0] == kind for key in {*found, *expected})
    return f"{len(places)} of {total}, {name} {off}"
