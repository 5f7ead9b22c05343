"""Transformer Engine in the ranks of checks for GPUs: its layers, fused gradient accumulation, fp8 parameters."""

import contextlib
import importlib
from unittest import mock

import torch

import megapatch
from megapatch import audit
from megapatch.audit._hashes import hash_of, stored
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.weight_sync import gathered_parameters
from rigs.gpu.ranks import split_step
from rigs.megatron.options import BOTH

SIZES = {"hidden": 64, "heads": 4, "vocab": 64, "seq": 16, "dtype": "bf16", "lr": 0.01}  # of fp8: multiples of 16
FP8 = {"fp8": "hybrid", "fp8_param": True, "use_cpu_initialization": False}
KINDS = {
    "layers": {},
    "fused": {"config": {"gradient_accumulation_fusion": True}},
    "delayed": {"config": {**FP8, "fp8_recipe": "delayed"}, "ddp": {"fp8_param_gather": True}},
    "tensorwise": {"config": {**FP8, "fp8_recipe": "tensorwise"}, "ddp": {"fp8_param_gather": True}},
}
CUT = (2, 2)
STEPS = 3


def model_with(kind):
    """Build a model of Transformer Engine's layers, whose output layer is Megatron's own."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.tensor_parallel import layers, model_parallel_cuda_manual_seed

    testing = importlib.import_module("megapatch.testing._tiny_gpt")
    options = {**BOTH, **SIZES, **KINDS[kind]}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(specs, "get_gpt_layer_local_spec", _layer))
        stack.enter_context(mock.patch.object(layers, "_grad_accum_fusion_available", True))
        if "fp8" in options.get("config", {}):
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)
            stack.enter_context(mock.patch.object(testing, "set_weights", _unfused))
        else:
            set_weights = testing.set_weights
            stack.enter_context(
                mock.patch.object(testing, "set_weights", lambda model: (set_weights(model), _unfused(model)))
            )
        return tiny_gpt(**options)


def _layer(*args, **kwargs):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec()


def _unfused(model):
    """Megatron's own fused accumulation needs Apex."""
    model.output_layer.gradient_accumulation_fusion = False


def quantized(model):
    """Return the parameters that Transformer Engine keeps in fp8."""
    return [parameter for parameter in model.chunks[0].parameters() if hasattr(parameter, "_data")]


def numbers(model):
    gathered_parameters(model.chunks)
    return {name: value.float() for name, value in model.parameters().items()}


def split_and_whole(kind):
    """Return the parameters after steps of one call, after steps of two, and how many of them are in fp8."""
    found = []
    for split in (False, True):
        model = model_with(kind)
        step = megapatch.TrainStep(model.chunks, model.optimizer)
        for number in range(STEPS):
            if split:
                split_step(model, step, number, CUT)
            else:
                model.train_step(number, num_microbatches=sum(CUT), two_tuple=True)
        found.append(numbers(model))
    return *found, len(quantized(model))


def audited(kind):
    """Return the audit's findings in some steps, and a hash of parameters before and after a bit changes."""
    audit.start(every=1)
    model = model_with(kind)
    for number in range(STEPS):
        model.train_step(number)
    found = [str(finding) for finding in audit.findings()]
    audit.stop()
    gathered_parameters(model.chunks)
    parameters = quantized(model) or list(model.chunks[0].parameters())
    before = hash_of(parameters).tolist()
    stored(parameters[0])[0].view(-1).view(torch.uint8)[:1].bitwise_xor_(1)
    return found, before, hash_of(parameters).tolist()


def job(rank, world_size):
    init_parallel()  # once: Transformer Engine keeps the group of the first fp8 pass
    for kind in KINDS:
        yield (kind, "split"), lambda kind=kind: split_and_whole(kind)
        yield (kind, "audited"), lambda kind=kind: audited(kind)
