"""ms-swift's own Megatron trainer for GRPO around a tiny GPT, of the releases in SWIFT_RELEASES.

docs/testing.md says what has stand-ins.
"""

import importlib
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from megapatch.testing import init_parallel
from megapatch.testing._tiny_gpt import _models, global_name
from rigs.imported import of_family
from rigs.megatron.exporters import BARE, find_lora
from rigs.megatron.gathers import parameters_of
from rigs.megatron.tiny_model import config_of
from rigs.ms_swift.model import LENGTH, MICROBATCHES, add_lora, arguments
from rigs.releases import find_release, needs, releases
from rigs.stand_ins import Anything, BarePackages, StandIns

STAND_INS = (
    "aiohttp",
    "cupy",
    "dacite",
    "datasets",
    "json_repair",
    "modelscope",
    "pandas",
    "ray",
    "requests",
    "swift.arguments",
    "swift.callbacks",
    "swift.dataloader",
    "swift.dataset",
    "swift.infer_engine",
    "swift.loss",
    "swift.megatron.arguments",
    "swift.megatron.callbacks",
    "swift.megatron.model",
    "swift.metrics",
    "swift.model",
    "swift.pipelines",
    "swift.rewards",
    "swift.rl_core",
    "swift.rlhf_trainers",
    "swift.rollout",
    "swift.sequence_parallel",
    "swift.template",
    "swift.trainers",
    "swift.tuners",
    "transformer_engine",
    "trl",
    "zmq",
)
BASE = "swift.megatron.trainers.base"
GRPO = "swift.megatron.trainers.grpo_trainer"
GRADS = {"overlap_grad_reduce": True}
BOTH = {**GRADS, "overlap_param_gather": True}
STEPS = 3
VOCABULARY = 32


RELEASES = releases("SWIFT")
needs_swift = needs("SWIFT", RELEASES)


@of_family("ms_swift")
def find_swift():
    """Make the release in SWIFT_RELEASE importable: the setup of a rank."""
    find_release("SWIFT_RELEASE")
    sys.meta_path[:0] = [StandIns(STAND_INS, stand_in), BarePackages(BARE)]
    vars(importlib.import_module("mcore_bridge")).update(__getattr__=_of_mcore_bridge, __version__="of its wheel")
    find_lora()


def stand_in(module, name):
    if name in OURS:
        return OURS[name]
    return type(name, (), {}) if name[:1].isupper() and "Mixin" in name else Anything(name, (), {})


def _of_mcore_bridge(name):
    """Give lazily the names of mcore-bridge's own __init__, which patches Transformer Engine's classes."""
    if name.startswith("__"):
        raise AttributeError(name)
    places = {"LoraParallelLinear": "tuners.lora", "GPTBridge": "bridge.gpt_bridge"}
    return getattr(importlib.import_module(f"mcore_bridge.{places.get(name, 'utils')}"), name)


@contextmanager
def _nothing(*args, **kwargs):
    yield


OURS = {
    "profiling_context": _nothing,
    "profiling_decorator": lambda function: function,
    "rows_to_batched": lambda rows: {key: [row[key] for row in rows] for key in rows[0]},
}
OURS["RowPreprocessor"] = SimpleNamespace(rows_to_batched=OURS["rows_to_batched"])


# ------------------------------------------------------------------------------------------ the trainer
def trainer_of(tuner="full", dtype="fp32", overlap=None, pp=1, vpp=None, **more):
    """Return ms-swift's own trainer for GRPO, made by its own constructor but for the model, in a new layout."""
    init_parallel(pp=pp, vpp=vpp)
    return beside(tuner, dtype, overlap, **more)


def beside(tuner="full", dtype="fp32", overlap=None, **more):
    """The same, in the layout that there is."""
    base = importlib.import_module(BASE).BaseMegatronTrainer

    class Trainer(importlib.import_module(GRPO).MegatronGRPOTrainer):
        def __init__(self, args):
            with mock.patch.object(sys.modules[BASE], "warmup_jit_function"):  # compiles kernels
                base.__init__(self, args, SimpleNamespace(padding_free=False, data_collator=None))
            self.vllm_mode, self.rollout_enable_lora, self.base_sync_done = "colocate", False, False
            self.engine, self.synced, self.device = _engine(), [], torch.device("cpu")

        def prepare_model(self):
            self.config = config_of(self.args.params_dtype)
            self.unwrapped_models = _models(self.config, VOCABULARY, LENGTH, False, True)
            if self.args.tuner_type == "lora":
                for model in self.unwrapped_models:
                    add_lora(model)
            self.bridge = _bridge()
            self.wrapped_models = importlib.import_module(BASE).wrap_model(self.args, self.unwrapped_models)

        def _get_data_collator(self):
            return None

        def _replace_data_iterator(self, data_iterator):
            """As GRPO's own, which generates rollouts by the weights that it has synced before."""
            self._move_model_to_vllm()
            self.synced.append(self.engine.inner_model.loaded)
            return data_iterator

        def forward_step(self, data_iterator, model):
            tokens = next(data_iterator)["tokens"]
            positions = torch.arange(LENGTH).expand_as(tokens)
            output = model(tokens, positions, None, labels=tokens)

            def loss(found):
                mean = found.float().mean()
                return mean, {"loss": mean.detach()}

            return output, loss

        def save_checkpoint(self):
            self.saved = parameters(self)

        def evaluate(self, iterator):
            return {}

        def call_event(self, event, **ignored):
            """No callbacks."""

        def on_log(self, logs, prefix=""):
            """Nothing is logged."""

    return Trainer(arguments(tuner, dtype, {**(overlap or {}), **more}))


def _bridge():
    """mcore-bridge's own exporter; the conversion to Hugging Face's names is ours: there is none."""

    class Bridge(importlib.import_module("mcore_bridge.bridge.gpt_bridge").GPTBridge):
        def _convert(self, models, *args, **kwargs):
            for model in models:
                for name, parameter in model.named_parameters():
                    yield global_name(model, name), parameter

    return object.__new__(Bridge)


def _engine():
    """vLLM, which copies what it is given."""
    inner = SimpleNamespace(loaded=None)

    def load_weights(tensors):
        inner.loaded = {name: tensor.detach().clone() for name, tensor in tensors}

    inner.load_weights = load_weights
    nothing = SimpleNamespace(reset_prefix_cache=lambda: None, reset_encoder_cache=lambda: None, model_config=None)
    return SimpleNamespace(inner_model=inner, engine=nothing)


# ------------------------------------------------------------------------------------------ steps
def batches(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [
        {"tokens": torch.randint(0, VOCABULARY, (1, LENGTH), generator=generator)} for _ in range(MICROBATCHES)
    ]


def train(trainer, step):
    """A step as train() and ms-swift's Ray worker make one: run_train_step() with its microbatches."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    chunks = len(trainer.wrapped_models)
    iterators = [iter(batches(rank, step)) for _ in range(chunks)]
    return trainer.run_train_step(iterators if chunks > 1 else iterators[0], None)


def worker_of(trainer):
    """Return ms-swift's own Ray worker around this trainer, with a rollout that copies what it is given."""
    worker = importlib.import_module("swift.ray.megatron.megatron_worker").MegatronWorker()
    worker._megatron, worker._args, worker.synced = trainer, trainer.args, []
    worker.rollout = SimpleNamespace(
        update_weights=lambda tensors, **ignored: worker.synced.append(
            {name: tensor.detach().clone() for name, tensor in tensors}
        ),
        reset_prefix_cache=lambda: None,
    )
    return worker


def parameters(trainer):
    """Return the trainer's parameters by their names in the whole model."""
    return parameters_of(trainer.wrapped_models)
