"""Right after a step NeMo-RL's own refits, by Megatron-Bridge's exporter, and the swap of its reference model read
that step's parameters with megatron.gathered-when-read, and half of them old without."""

import contextlib
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from rigs.megatron.exporters import find_conversions, installed, new_bridge, tasks_of
from rigs.megatron.gathers import OVERLAP, PLAIN
from rigs.nemo_rl.steps import read_after_steps
from rigs.nemo_rl.worker import GPT, find_nemo_rl, needs_nemo_rl, worker_for
from rigs.releases import import_before_stand_ins
from rigs.stand_ins import Anything, StandIns

from megapatch.testing import init_parallel, run_ranks, tiny_gpt

pytestmark = [
    needs_nemo_rl,
    pytest.mark.skipif(not installed("Megatron-Bridge"), reason="Megatron-Bridge is not installed"),
]

STEPS = 3
SCALES = "nemo_rl.models.generation.vllm.quantization.fp8_train_utils"  # its package asks for vLLM


def find_nemo_rl_and_exporter():
    import_before_stand_ins()
    find_nemo_rl()
    find_conversions()
    sys.meta_path.append(StandIns(["vllm"], lambda module, name: Anything(name, (), {})))
    sys.modules[SCALES] = ModuleType(SCALES)
    sys.modules[SCALES].get_vllm_qkv_scale_names = None  # without an FP8 cache it is not called


class Bridge:
    """The part of Bridge's AutoBridge that the worker calls; the real one would ask Hugging Face for a model."""

    def export_hf_weights(self, model, show_progress, conversion_tasks):
        module = importlib.import_module("megatron.bridge.models.conversion.model_bridge")
        return new_bridge(module).stream_weights_megatron_to_hf(
            model,
            SimpleNamespace(),
            show_progress=show_progress,
            conversion_tasks=tasks_of(module, model),
            merge_adapter_weights=False,
        )


def worker_of(options):
    worker = worker_for(tiny_gpt(**{**GPT, **options, "ddp": GPT["ddp"]}))
    worker.model.config.share_embeddings_and_output_weights = False  # Bridge's configs have it
    worker.megatron_bridge, worker.refit_conversion_tasks = Bridge(), None
    return worker


def refit(worker):
    """Return generation's parameters: streams, refits and checkpoint engines all read by this method."""
    return {name: tensor.clone() for name, tensor in worker._iter_params_with_optional_kv_scales()}


def swapped(worker):
    """The policy's parameters after the reference model was swapped in and out."""
    with worker.use_reference_model():
        pass
    return {name: parameter.detach().clone() for name, parameter in worker.model.module.named_parameters()}


def read(rank, world_size, reader):
    """Return which fraction of what is read is wrong, by step, and the gathers, for each bucket group."""
    init_parallel()
    with contextlib.redirect_stdout(None):
        return read_after_steps(reader, worker_of(PLAIN), worker_of(OVERLAP), STEPS)


def of_ranks(reader, **env):
    return run_ranks(read, 2, reader, setup=find_nemo_rl_and_exporter, timeout=300, env=env)


def test_a_refit_reads_the_last_step():
    without = of_ranks(refit, MEGAPATCH_DISABLE="megatron.gathered-when-read")
    for (old, gathers_without), (fractions, gathers) in zip(without, of_ranks(refit), strict=True):
        assert all(0.4 < fraction < 0.6 for fraction in old)
        assert fractions == [0.0] * STEPS
        assert gathers == gathers_without  # the forward pass after a refit does not gather again


def test_a_swap_of_the_reference_model_leaves_the_last_step():
    for fractions, _ in of_ranks(swapped):
        assert fractions == [0.0] * STEPS
