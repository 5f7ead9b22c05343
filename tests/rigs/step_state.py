"""Models that add things up outside of their gradients, what they hold, and places where a step can be dropped."""

import contextlib
import importlib
from unittest import mock

from megapatch.testing import tiny_gpt
from megapatch.testing._data import forward_step
from rigs.megatron.options import Interrupted, raising_half_way
from rigs.train_step.models import MEAN, MTP

ROUTERS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1.0,
}
LOSS_SCALE = {"dtype": "fp16", "loss_scale": 64.0, "optim": {"loss_scale_window": 3}}
GLOBAL, SCALED = "global aux loss", "predicted tokens and loss scale"
MODELS = {
    "expert bias": {"experts": 4, "config": ROUTERS},
    GLOBAL: {"experts": 4, "config": {**ROUTERS, "moe_router_load_balancing_type": "global_aux_loss"}},
    SCALED: {**MTP, **LOSS_SCALE},
}


def has_global_loss():
    """Whether this Megatron has global_aux_loss, and counts for it (from 0.15 on)."""
    router = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter
    return hasattr(router, "reset_global_aux_loss_tracker")


def new_model(name, **more):
    """Return a model that has four layers, and clear what earlier ones have logged."""
    logged_by_process().clear()
    predicted().clear()
    return tiny_gpt(layers=4, lr=0.5, **MODELS[name], **more)


def logged_by_process():
    """Return the process-wide losses of routers, by name: Megatron's own dictionary."""
    for module, function in (
        ("megatron.core.transformer.moe.moe_logging", "get_moe_metrics_tracker"),  # after 0.17
        ("megatron.core.transformer.moe.moe_utils", "get_moe_layer_wise_logging_tracker"),
        ("megatron.core.parallel_state", "get_moe_layer_wise_logging_tracker"),  # 0.12
    ):
        with contextlib.suppress(ImportError):
            if found := getattr(importlib.import_module(module), function, None):
                return found()._metrics if "metrics" in function else found()
    raise AssertionError("no tracker of routers' losses")


def predicted():
    """Return the process-wide losses of multi-token prediction: Megatron's own dictionary."""
    return importlib.import_module("megatron.core.transformer.multi_token_prediction").MTPLossLoggingHelper.tracker


def held(model):
    """Return the state of model, optimizer and process outside of gradients, as plain numbers."""
    buffers = {
        f"{index} {name}": buffer.tolist()
        for index, chunk in enumerate(model.chunks)
        for name, buffer in chunk.named_buffers()
        if ".router." in name
    }
    optimizers = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    scalers = [getattr(part, "grad_scaler", None) for part in optimizers]
    losses = {
        name: (entry["values"] if isinstance(entry, dict) else entry.values).tolist()
        for name, entry in logged_by_process().items()
    }
    return (
        buffers,
        [scaler and (float(scaler.scale), getattr(scaler, "_growth_tracker", None)) for scaler in scalers],
        losses,
        {name: value.tolist() for name, value in predicted().items() if hasattr(value, "tolist")},
    )


def raising_forward_step(microbatch, place):
    """Return a forward step that raises at a microbatch: in the "forward" pass, or in the "loss"."""
    calls = iter(range(10))

    def function(data, model):
        index = next(calls)
        output, loss_function = forward_step(data, model, **MEAN)
        if index != microbatch:
            return output, loss_function
        if place == "forward":
            raise Interrupted
        return output, mock.Mock(side_effect=Interrupted)

    return function


def raising_after(target, name):
    """Let a function of an object do its work, and then raise."""
    original = getattr(target, name)

    def function(*args, **kwargs):
        original(*args, **kwargs)
        raise Interrupted

    return mock.patch.object(target, name, function)


PLACES = ("forward", "loss", "backward", "before finalize", "after finalize", "in the optimizer")


def interrupted(model, place, microbatch=1):
    """Return a context in which a step raises at a place, and the forward step to use there (None: the usual)."""
    config, optimizer = model.config, model.optimizer
    if place in ("forward", "loss"):
        return contextlib.nullcontext(), raising_forward_step(microbatch, place)
    return {
        "backward": lambda: raising_half_way(model, microbatch),
        "before finalize": lambda: mock.patch.object(config, "finalize_model_grads_func", side_effect=Interrupted),
        "after finalize": lambda: raising_after(config, "finalize_model_grads_func"),
        "in the optimizer": lambda: mock.patch.object(optimizer, "step_with_ready_grads", side_effect=Interrupted),
    }[place](), None
