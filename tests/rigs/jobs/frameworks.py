"""For the process that imports this, what slime, NeMo-RL, SkyRL and verl need on a CPU: packages and models."""

import importlib
import operator
import os
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy
import torch
import wrapt
from torch.overrides import TorchFunctionMode

from rigs.jobs import on_cpu  # noqa: F401 (before Megatron)
from rigs.stand_ins import OF_GPUS, ForImporters

OF_SLIME = ("aiohttp", "mooncake", "pylatexenc", "sglang", "sglang_router")
OF_NEMO_RL = (
    "absl",
    "decord",
    "diffusers",
    "fastapi",
    "hydra",
    "mlflow",
    "nemo_automodel",
    "prometheus_client",
    "pylatexenc",
    "pynvml",
    "scipy",
    "sglang",
    "soundfile",
    "swanlab",
    "uvicorn",
    "vllm",
    "zmq",
)
OF_VERL = ("aiohttp", "cachetools", "fastapi", "openai", "orjson", "uvicorn", "vllm", "zmq")
OF_SKYRL = ("aiohttp", "fastapi", "flash_attn", "sglang", "uvicorn", "vllm")
sys.meta_path += [
    ForImporters(("skyrl_train",), OF_SKYRL),
    ForImporters(("verl",), OF_VERL),
    ForImporters(("nemo_rl",), OF_GPUS),
    ForImporters(("slime",), OF_SLIME),
    ForImporters(("nemo_rl", *(["megatron.bridge"] if "NEMO_RL_CHECKOUT" in os.environ else [])), OF_NEMO_RL),
]


# ------------------------------------------------------------------------------------------ slime
class MemorySaver(ModuleType):
    """torch_memory_saver, which takes tensors from a GPU and brings them back; those of its regions are lost."""

    __file__ = os.path.join(os.environ["JOB_FOLDER"], "torch_memory_saver", "__init__.py")
    disable = nullcontext

    def __init__(self, name):
        super().__init__(name)
        self.torch_memory_saver, self.regions = self, []

    def region(self, tag, enable_cpu_backup):
        self.regions.append(Zeros())
        return self.regions[-1]

    def pause(self):
        for tensor in (tensor for region in self.regions for tensor in region.made):
            tensor.fill_(torch.nan)

    def resume(self):
        pass


class Zeros(TorchFunctionMode):
    """Collects the tensors that torch.zeros() makes in it."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.__name__ == "zeros":
            self.made.append(result)
        return result


sys.modules["torch_memory_saver"] = MemorySaver("torch_memory_saver")


@wrapt.when_imported("slime.backends.megatron_utils.initialize")
def accept_numpy_2(module):
    module.np = SimpleNamespace(__version__="1.26", random=numpy.random)
    torch.cuda.mem_get_info = lambda *ignored: (2**36, 2**36)  # below 3 GB each collective collects garbage


@wrapt.when_imported("slime.backends.megatron_utils.update_weight.update_weight_from_distributed")
def send_by_gloo(module):
    of_any_backend = module.init_process_group
    module.init_process_group = lambda backend, **options: of_any_backend("gloo", **options)


@wrapt.when_imported("slime.backends.megatron_utils.megatron_to_hf")
def convert_local_layers(module):
    of_transformer_engine = module.convert_llama_to_hf
    module.convert_llama_to_hf = lambda args, name, tensor: of_transformer_engine(
        args, name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"), tensor
    )


@wrapt.when_imported("slime.backends.sglang_utils.arguments")
def give_few_options(module):
    module.ServerArgs = SimpleNamespace(
        add_cli_args=lambda parser: [
            parser.add_argument(f"--{name}-size", type=int, default=1) for name in ("dp", "pp", "ep")
        ]
    )


@wrapt.when_imported("slime.ray.rollout")
def give_an_engine(module):
    module.SGLangEngine = importlib.import_module("rigs.jobs.slime").Engine
    module._start_router = lambda args, **options: ("127.0.0.1", 1)


# ------------------------------------------------------------------------------------------ NeMo-RL
@wrapt.when_imported("nemo_rl.models.policy.workers.megatron_policy_worker")
def stand_in(module):
    importlib.import_module("rigs.jobs.nemo_rl").stand_in(module)


# ------------------------------------------------------------------------------------------ SkyRL
@wrapt.when_imported("ray.util.placement_group")
def keep_where_it_was(module):
    """For skyrl-train, which pins an older Ray."""
    moved = importlib.import_module("ray.util.scheduling_strategies")
    module.PlacementGroupSchedulingStrategy = moved.PlacementGroupSchedulingStrategy


@wrapt.when_imported("skyrl_train.workers.megatron.megatron_worker")
def stand_in_for_skyrl(module):
    importlib.import_module("rigs.jobs.skyrl").stand_in()


# ------------------------------------------------------------------------------------------ verl
@wrapt.when_imported("verl.workers.engine.megatron.transformer_impl")
def stand_in_for_verl(module):
    importlib.import_module("rigs.jobs.verl").stand_in(module)


@wrapt.when_imported("verl.utils.attention_utils")
def take_what_an_npu_has(module):
    here = operator.attrgetter("index_first_axis", "pad_input", "rearrange", "unpad_input")
    module._get_attention_functions = lambda: here(importlib.import_module("verl.utils.npu_flash_attn_utils"))


@wrapt.when_imported("verl.workers.rollout.base")
def give_verl_an_engine(module):
    module._ROLLOUT_REGISTRY["vllm", "async"] = "rigs.jobs.verl.Engine"


@wrapt.when_imported("verl.experimental.reward_loop")
def give_no_rewards(module):
    module.RewardLoopManager = importlib.import_module("rigs.jobs.verl").Rewards


@wrapt.when_imported("verl.utils.tracking")
def print_metrics(module):
    module.Tracking = importlib.import_module("rigs.jobs.verl").Tracking
