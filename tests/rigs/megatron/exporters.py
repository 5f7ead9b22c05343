"""The real exporters of Megatron-Bridge, mbridge and mcore-bridge on a tiny GPT, without any real conversion.

Their packages' __init__ import every conversion, and with those Transformer Engine, so only the exporters' own
modules are imported. Packages that are not installed have stand-ins.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import SimpleNamespace

import torch

from megapatch._python.finding import find_module
from rigs.megatron.gathers import unwrapped
from rigs.stand_ins import BRIDGE, Anything, BarePackages, StandIns

CONVERSION = f"{BRIDGE}.models.conversion"
DECORATORS = f"{BRIDGE}.models.decorators"
TUNERS = "mcore_bridge.tuners"
BARE = (BRIDGE, f"{BRIDGE}.models", CONVERSION, "mbridge", "mcore_bridge", "mcore_bridge.bridge", TUNERS)
NOT_THEIRS = (f"{BRIDGE}.peft",)
# On import Megatron looks for what is installed, and would ask a stand-in for its version.
BEFORE_STAND_INS = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
)
MISSING = (
    "PIL",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "megatron.energon",
    "modelopt",
    "modelscope",
    "omegaconf",
    "peft",
    "regex",
    "rich",
    "safetensors",
    "six",
    "tqdm",
    "transformers",
    "triton",
    "yaml",
)
MODULES = {
    "Megatron-Bridge": f"{CONVERSION}.model_bridge",
    "Megatron-Bridge, quantized": f"{CONVERSION}.quant_bridge",
    "mbridge": "mbridge.core.bridge",
    "mcore-bridge": "mcore_bridge.bridge.gpt_bridge",
}


def installed(name):
    package = BRIDGE if MODULES[name].startswith(BRIDGE) else MODULES[name].partition(".")[0]
    found = find_module(package)
    file = MODULES[name].removeprefix(f"{package}.").replace(".", "/") + ".py"
    return found is not None and any(Path(folder, file).is_file() for folder in found.submodule_search_locations)


def find_exporters():
    """Make the exporters importable: the setup of a rank."""
    for name in BEFORE_STAND_INS:
        if find_module(name):
            importlib.import_module(name)

    def make(module, name):
        return Anything(name, (), {})

    sys.meta_path[:0] = [StandIns(NOT_THEIRS, make), BarePackages(BARE)]
    missing = list(filter(is_missing, (*MISSING, "transformer_engine")))
    sys.meta_path.append(StandIns(missing, make))
    if "peft" in missing:
        importlib.import_module("peft").__version__ = "0.19.0"  # mcore-bridge asks
    if find_module(TUNERS):
        find_lora()


def find_lora():
    """Let mcore-bridge's package of tuners give what its own __init__, which patches peft, imports."""
    importlib.import_module(TUNERS).__getattr__ = _of_tuners


def _of_tuners(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module(f"{TUNERS}.lora"), name)


def is_missing(name):
    """Whether it needs a stand-in, which would otherwise also answer for names of a half-loaded package."""
    return find_module(name) is None


class RealConversions:
    """Finds Bridge's conversions, and no others, where all else in the package of its models has stand-ins."""

    def find_spec(self, name, path=None, target=None):
        if not any(f"{name}.".startswith(f"{real}.") for real in (CONVERSION, DECORATORS)):
            return None
        package, _, last = name.rpartition(".")
        subfolder = package.removeprefix(f"{BRIDGE}.").replace(".", "/")
        folders = [f"{folder}/{subfolder}" for folder in find_module(BRIDGE).submodule_search_locations]
        if name in (CONVERSION, DECORATORS):
            bare = ModuleSpec(name, None, is_package=True)
            bare.submodule_search_locations = [f"{folder}/{last}" for folder in folders]
            return bare if name == CONVERSION else PathFinder.find_spec(name, folders)
        found = PathFinder.find_spec(name, folders)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found


def find_conversions():
    """Make Bridge's exporters importable where `rigs.megatron.bridge.find_bridge` has put stand-ins."""
    sys.meta_path.insert(0, RealConversions())
    # Not triton: Megatron takes what is there for the real one.
    missing = [name for name in filter(is_missing, MISSING) if name != "triton"]
    sys.meta_path.append(StandIns(missing, lambda module, name: Anything(name, (), {})))


def stream(name, chunks):
    """Return the exporter's generator over these chunks. Nothing is read before its first `next`."""
    return STREAMS[name](importlib.import_module(MODULES[name]), chunks)


class _Unchanged:
    """A mapping of Bridge's: each parameter has one name and is not converted."""

    is_grouped_export = is_expert = False
    tp_size = ep_size = 1

    def __init__(self, name):
        self.name = name

    def megatron_to_hf(self, weights, module, *quantization):
        return {self.name: weights}

    megatron_to_hf_quant = megatron_to_hf


def tasks_of(module, chunks):
    """Conversion tasks as Bridge makes them: they hold the parameters."""
    return [
        module.WeightConversionTask(
            param_name=name,
            global_param_name=name,
            mapping=_Unchanged(name),
            megatron_module=unwrapped(chunk),
            param_weight=parameter,
        )
        for chunk in chunks
        for name, parameter in unwrapped(chunk).named_parameters()
    ]


def new_bridge(module):
    class Bridge(module.MegatronModelBridge):
        provider_bridge = mapping_registry = None

    return object.__new__(Bridge)


def _of_bridge(module, chunks):
    return new_bridge(module).stream_weights_megatron_to_hf(
        chunks,
        SimpleNamespace(),
        show_progress=False,
        conversion_tasks=tasks_of(module, chunks),
        merge_adapter_weights=False,
    )


def _of_quantizing_bridge(_, chunks):
    module = importlib.import_module(MODULES["Megatron-Bridge"])
    return new_bridge(module).stream_weights_megatron_to_hf_quant(
        chunks,
        SimpleNamespace(),
        lambda name: False,
        None,
        show_progress=False,
        conversion_tasks=tasks_of(module, chunks),
    )


def _of_mbridge(module, chunks):
    class Bridge(module.Bridge):
        def _weight_name_mapping_mcore_local_to_global(self, model, **kwargs):
            return {name: name for name, _ in model.named_parameters()}

        def _weight_to_hf_format(self, name, parameter):
            return [name], [parameter]

    bridge = object.__new__(Bridge)
    group = torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
    bridge.mpu = SimpleNamespace(pp_rank=0, pp_size=1, pp_group=group, tp_size=1, ep_size=1)
    bridge._weight_merge_across_tp = lambda name, parameters, like: parameters[0]
    return bridge.export_weights(chunks)


def _of_mcore_bridge(module, chunks):
    class Bridge(module.GPTBridge):
        def _convert(self, models, *args, **kwargs):
            for model in models:
                yield from model.named_parameters()

    return object.__new__(Bridge).export_weights(chunks)


STREAMS = {
    "Megatron-Bridge": _of_bridge,
    "Megatron-Bridge, quantized": _of_quantizing_bridge,
    "mbridge": _of_mbridge,
    "mcore-bridge": _of_mcore_bridge,
}
