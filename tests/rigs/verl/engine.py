"""verl's own MegatronEngine around a tiny GPT, of the releases in VERL_RELEASES and the checkout in VERL_CHECKOUT.

docs/testing.md says what has stand-ins. A release has processes of its own: all have the same names.
"""

import contextlib
import functools
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from megapatch._mcore.process_groups import process_groups
from megapatch.testing import _parallel, destroy_parallel
from rigs import releases
from rigs.imported import of_family
from rigs.megatron.exporters import find_conversions, installed
from rigs.megatron.gathers import parameters_of
from rigs.releases import find_release, needs
from rigs.stand_ins import BRIDGE, StandIns
from rigs.verl.bridge import LENGTH, SIZES, VOCABULARY, stand_in

STAND_INS = (
    BRIDGE,
    "PIL",
    "accelerate",
    "aiohttp",
    "cachetools",
    "datasets",
    "fastapi",
    "huggingface_hub",
    "hydra",
    "mbridge",
    "orjson",
    "pandas",
    "peft",
    "ray",
    "requests",
    "torchdata",
    "tqdm",
    "transformers",
    "uvicorn",
)
ENGINE = "verl.workers.engine.megatron.transformer_impl"
GRADS = {"overlap_grad_reduce": True}
BOTH = {**GRADS, "overlap_param_gather": True}
STEPS = 2
SAMPLES, MICRO = 4, 1  # samples of a rank in a step, and of a microbatch


@dataclass(frozen=True)
class Release(releases.Release):
    """A release of verl."""

    @property
    def there(self):
        return (Path(self.folder) / "verl/workers").is_dir()

    def has(self, path):
        return (Path(self.folder) / "verl" / path).is_file()

    def text(self, path):
        """The text of one of its files, by which a test knows what it has."""
        return (Path(self.folder) / "verl" / path).read_text()

    @property
    def has_bridge(self):
        """Whether its engine builds the model by Megatron-Bridge, of which there is a stand-in."""
        return "to_megatron_provider" in self.text("workers/engine/megatron/transformer_impl.py")

    def ranks(self, function, world_size, *args, setup=None, **options):
        """Call run_ranks in processes that find this release."""
        return self.ranks_of("VERL_RELEASE", function, world_size, *args, setup=setup or find_verl, **options)


RELEASES = releases.releases("VERL", Release)
ENGINES = [release for release in RELEASES if release.has_bridge]
needs_verl = needs("VERL", RELEASES)


@of_family("verl")
def find_verl(real=()):
    """Make the release in VERL_RELEASE importable: the setup of a rank. Packages in `real` get no stand-ins."""
    find_release("VERL_RELEASE")
    sys.meta_path.insert(0, StandIns(set(STAND_INS) - set(real), stand_in))
    if installed("Megatron-Bridge"):
        find_conversions()
    for name in (
        "empty_cache",
        "max_memory_allocated",
        "max_memory_reserved",
    ):  # verl takes torch.cpu for torch.cuda
        vars(torch.cpu).setdefault(name, getattr(torch.cuda, name))


# ------------------------------------------------------------------------------------------ the engine
def engine_of(
    dtype="bfloat16",
    overlap=None,
    optimizer=None,
    ddp=None,
    model=None,
    engine=None,
    pp=1,
    vpp=None,
    tp=1,
    colocated=False,
):
    """Return verl's own engine, initialized, in the layout that these sizes make of the world.

    overlap     the options of Megatron's DistributedDataParallel, and its optimizer's where it has such
    optimizer, ddp, model, engine
                more of Megatron's optimizer, of DistributedDataParallel, of the model, and of verl's engine
    colocated   beside the last engine, in its layout
    """
    config = importlib.import_module("verl.workers.config")
    overlap = overlap or {}
    gather = {name: value for name, value in overlap.items() if name == "overlap_param_gather"}
    engine_config = config.McoreEngineConfig(
        dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        sequence_parallel=False,
        use_remove_padding=False,  # packed sequences take Transformer Engine
        use_dynamic_bsz=False,
        override_ddp_config={**overlap, **({"bucket_size": 1000} if overlap else {}), **(ddp or {})},
        override_transformer_config={"overlap_p2p_comm": bool(vpp), **(model or {})},
        override_mcore_model_config={},
        **{"vanilla_mbridge": False, "use_mbridge": True, **(engine or {})},
    )
    optimizer_config = config.McoreOptimizerConfig(
        optimizer="adam",
        lr=0.1,
        min_lr=0.05,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        total_training_steps=100,
        weight_decay=0.0,
        clip_grad=1e9,
        override_optimizer_config={
            "adam_eps": 1.0,  # nearly SGD, which shows a wrong scale
            "use_precision_aware_optimizer": False,  # takes Transformer Engine
            **gather,
            **(optimizer or {}),
        },
    )
    with contextlib.nullcontext() if colocated else _new_layout():
        built = importlib.import_module(ENGINE).MegatronEngineWithLMHead(
            model_config(), engine_config, optimizer_config, config_of_checkpoints()
        )
        built.initialize()
    return built


@contextlib.contextmanager
def _new_layout():
    """Take down the last layout with its process groups, each of which has threads; the engine makes its own."""
    destroy_parallel()
    _parallel._destroy_process_groups()
    before = process_groups()
    try:
        yield
    finally:
        _parallel._of_layout.extend(group for group in process_groups() if group not in before)


@functools.cache
def model_config():
    """Return verl's HFModelConfig without what it would read from a model's folder."""
    module = importlib.import_module("verl.workers.config")

    class Config(module.HFModelConfig):
        def __post_init__(self):
            pass

    hf = SimpleNamespace(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        hidden_size=SIZES["hidden_size"],
        rope_theta=10000.0,
        rope_parameters={"rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    config = Config(path="nowhere", load_tokenizer=False, use_remove_padding=False)
    tokenizer = SimpleNamespace(pad_token_id=0)
    values = {"hf_config": hf, "architectures": hf.architectures, "local_path": "nowhere", "tokenizer": tokenizer}
    for name, value in {**values, "share_embeddings_and_output_weights": False}.items():
        object.__setattr__(config, name, value)  # it is frozen
    return config


def config_of_checkpoints():
    return importlib.import_module("verl.trainer.config").CheckpointConfig()


def batch_of(step, rank=None, samples=SAMPLES):
    """Return a data-parallel rank's samples of a step, in verl's own form: jagged, of different lengths."""
    from megatron.core import parallel_state

    tensors = importlib.import_module("verl.utils.tensordict_utils")
    rank = parallel_state.get_data_parallel_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = [LENGTH - (step + index) % 3 for index in range(samples)]
    rows = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
    masks = [torch.arange(len(row)) >= 2 for row in rows]
    data = {
        "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "loss_mask": torch.nested.as_nested_tensor([mask.long() for mask in masks], layout=torch.jagged),
        "position_ids": torch.nested.as_nested_tensor(
            [torch.arange(len(row)) for row in rows], layout=torch.jagged
        ),
        "temperature": torch.ones(samples),
    }
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": MICRO,
        "global_batch_size": samples * parallel_state.get_data_parallel_world_size(),
        "calculate_entropy": False,
    }
    return tensors.get_tensordict(data, non_tensor_dict=settings)


def loss():
    """Return verl's own loss of supervised training: a sum over tokens, divided by those of the global batch."""
    return functools.partial(importlib.import_module("verl.workers.utils.losses").sft_loss, None)


def train(engine, step):
    """Train a step as verl's worker does, and return what its engine returns."""
    with engine.train_mode():
        found = engine.train_batch(batch_of(step), loss())
    engine.lr_scheduler_step()
    return found


def parameters(engine):
    """Return the engine's parameters by their names in the whole model."""
    return parameters_of(engine.module)
