"""ROLL's MegatronTrainStrategy around a tiny GPT: of the checkout in ROLL_CHECKOUT, or our imitation of it.

Real, of a checkout: initialize(), train_step() and the forward step that it drives, on megatron-core. Our tiny GPT
takes the place of mcore_adapter's models. Stand-ins: Ray, data, offloading, and all else of ROLL.
"""

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from rigs.imported import of_family
from rigs.megatron.tiny_model import config_of, models_of
from rigs.releases import import_before_stand_ins
from rigs.stand_ins import Anything, BarePackages, StandIns
from rigs.variables import folder_in

STRATEGY = "roll.distributed.strategy.megatron_strategy"
PACKAGES = "roll", "roll.distributed", "roll.distributed.strategy"
STAND_INS = "roll", "mcore_adapter", "ray", "codetiming", "transformers", "peft"
IMITATIONS = str(Path(__file__).parents[2] / "imitations")
CHECKOUT = folder_in("ROLL_CHECKOUT")
VOCABULARY, LENGTH, MICROBATCHES = 32, 8, 2


@of_family("roll")
def find_roll():
    """Make ROLL's strategy importable: the setup of a rank."""
    import_before_stand_ins()
    folder = os.environ.setdefault("ROLL_FOLDER", str(CHECKOUT or IMITATIONS))
    sys.meta_path[:0] = [BarePackages(PACKAGES, [folder]), StandIns(STAND_INS, stand_in, real=[STRATEGY])]


def stand_in(module, name):
    return OURS.get(name, Anything(name, (), {}))


class Scheduler:
    """Counts its steps."""

    steps = 0

    def step(self):
        self.steps += 1


def _append(found, more):
    for name, value in more.items():
        found.setdefault(name, []).append(value)


def _optimizer(*args):
    from megatron.core.optimizer import get_megatron_optimizer

    return get_megatron_optimizer(*args)


OURS = {
    "InferenceStrategy": type("InferenceStrategy", (), {"__init__": lambda self, worker: None}),
    "TrainStrategy": type("TrainStrategy", (), {}),
    "get_megatron_lr_scheduler": lambda *ignored, **also_ignored: Scheduler(),
    "get_megatron_optimizer": _optimizer,
    "default_processor_provider": lambda **ignored: None,
    "is_peft_available": lambda: False,
    "append_to_dict": _append,
}


class Models:
    """The part of mcore_adapter's models that ROLL uses."""

    def __init__(self, dtype, **more):
        self.config = config_of(dtype, **more)
        self.models = models_of(self.config, VOCABULARY, LENGTH)

    def get_models(self):
        return self.models

    def train(self):
        for chunk in self.models:
            chunk.train()

    def __len__(self):
        return len(self.models)

    def __iter__(self):
        return iter(self.models)


class Batch:
    """The part of its DataProto that ROLL uses here."""

    def __init__(self, tokens):
        self.batch = _Tensors(input_ids=tokens, attention_mask=None)
        self.batch.batch_size = tokens.shape
        self.meta_info, self.non_tensor_batch = {}, {}

    def chunk(self, chunks):
        return [Batch(part) for part in self.batch["input_ids"].chunk(chunks)]


class _Tensors(dict):
    """Tensors by name, with a batch_size."""


def strategy_of(dtype="fp16", overlap=True, **model):
    """Return ROLL's own strategy, initialized by its own initialize()."""
    strategy = object.__new__(importlib.import_module(STRATEGY).MegatronTrainStrategy)
    precision = {"fp16": dtype == "fp16", "bf16": dtype == "bf16"}
    arguments = dict(
        accumulate_allreduce_grads_in_fp32=True, overlap_grad_reduce=overlap, use_distributed_optimizer=False,
        check_for_nan_in_loss_and_grad=True, ddp_bucket_size=1000, optimizer="sgd", learning_rate=0.1,
        lr_scheduler_kwargs={}, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8,
        max_grad_norm=1e9, delay_grad_reduce=False, compile_warmup=False, max_steps=100,
        gradient_accumulation_steps=MICROBATCHES,
    )  # fmt: skip
    worker = dict(
        use_dynamic_batching_in_train=False, use_sequence_packing=False, apply_loss_scale=True, name="actor",
        model_args=None, training_args=SimpleNamespace(max_steps=100, per_device_train_batch_size=1),
    )  # fmt: skip
    own = dict(
        worker=SimpleNamespace(
            rank_info=SimpleNamespace(), pipeline_config=SimpleNamespace(sequence_length=LENGTH)
        ),
        worker_config=SimpleNamespace(**worker),
        megatron_train_args=SimpleNamespace(**arguments, **precision),
        enable_router_replay=False,
        use_sequence_packing=False,
        seq_length=LENGTH,
        _validate_vlm_packing_support=lambda: None,
        _get_batch_num_tokens=lambda *ignored, **also_ignored: None,
        _get_global_valid_samples=lambda *ignored, **also_ignored: None,
        _get_feature_on_this_cp_rank=lambda tensor, name=None: tensor,
        load_states=lambda **ignored: None,
        offload_states=lambda **ignored: None,
    )
    vars(strategy).update(own)
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    strategy.initialize(lambda **ignored: Models(kind, **model))
    return strategy


def train(strategy, step):
    """ROLL's own train_step(), with the cross entropy of the next token, which ROLL scales to that of a step."""
    from megatron.core import parallel_state

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (MICROBATCHES, LENGTH), generator=generator)

    def loss(data, logits):
        logits, labels = logits[:, :-1].float(), data.batch["input_ids"][:, 1:]
        found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return found / (MICROBATCHES * size), {"loss": found.item()}

    return strategy.train_step(Batch(tokens), loss)


def parameters(strategy):
    return {
        name: parameter.detach().clone()
        for chunk in strategy.models_wrapped
        for name, parameter in chunk.named_parameters()
    }
