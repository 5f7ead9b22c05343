"""NeMo-RL's DTensor policy workers around a tiny causal language model on CPU, sharded by the real FSDP2.

The second worker trains with NeMo Automodel, of AUTOMODEL_CHECKOUT or the submodule of NeMo-RL's checkout; without
a checkout there is our imitation of the first. The model is ours, which takes packed sequences.
"""

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from rigs.imported import of_family
from rigs.nemo_rl import steps as nemo_rl_steps
from rigs.nemo_rl.worker import CHECKOUT, LENGTH, VOCABULARY, find_nemo_rl
from rigs.skyrl.releases import Anything
from rigs.stand_ins import StandIns
from rigs.variables import folder_in

FIRST = "dtensor_policy_worker"
SECOND = "dtensor_policy_worker_v2"
CLASSES = {FIRST: "DTensorPolicyWorkerImpl", SECOND: "DTensorPolicyWorkerV2Impl"}
AUTOMODEL = Path(
    folder_in("AUTOMODEL_CHECKOUT") or Path(CHECKOUT or "") / "3rdparty/Automodel-workspace/Automodel"
)
WORKERS = [FIRST, SECOND] if CHECKOUT and (AUTOMODEL / "nemo_automodel").is_dir() else [FIRST]
# Of Automodel: for setting up and saving models.
AUTOMODEL_STAND_INS = (
    "nemo_automodel._transformers",
    "nemo_automodel.components._peft",
    "nemo_automodel.components.checkpoint",
    "nemo_automodel.components.config",
    "nemo_automodel.components.moe",
)
HIDDEN = 8
SLICES = {  # those where all ranks have as many samples, and those where they do not
    **nemo_rl_steps.SLICES,
    "ranks apart": ((2, 6), (6, 2)),
    "odd": ((3, 5), (1, 1), (4, 2)),
}
CONSTANT = ("lr", "global_valid_seqs", "global_valid_toks")


@of_family("nemo_rl")
def find_workers():
    """Make the workers importable: the setup of a rank."""
    find_nemo_rl()
    if not CHECKOUT:
        return
    sys.meta_path.insert(0, StandIns(("accelerate", *AUTOMODEL_STAND_INS), _make))
    if SECOND in WORKERS:
        _bare_automodel()
    warnings.filterwarnings("ignore", "CUDA is not available")  # by torch.autocast("cuda")


def _make(module, name):
    return Anything(name, (), {})


def _bare_automodel():
    """Make Automodel's packages importable without their __init__s, which import models and data sets."""
    for name in ("", ".components", ".components.distributed", ".components.models", ".components.models.common"):
        package = ModuleType(f"nemo_automodel{name}")
        package.__path__ = [str(AUTOMODEL / package.__name__.replace(".", "/"))]
        sys.modules[package.__name__] = package
    name = "NeMoAutoModelForSequenceClassification"
    setattr(sys.modules["nemo_automodel"], name, _make("nemo_automodel", name))


def module_of(worker):
    return importlib.import_module(f"nemo_rl.models.policy.workers.{worker}")


class Block(nn.Module):
    """Mixes each position with the one before it in its sequence."""

    def __init__(self):
        super().__init__()
        self.now, self.before = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.raises = False

    def forward(self, values, starts):
        if self.raises:
            raise Interrupted
        before = torch.roll(values, 1, dims=1).masked_fill(starts, 0.0)
        return values + torch.tanh(self.now(values) + self.before(before))


class Interrupted(Exception):
    """Raised by tests."""


class CausalLM(nn.Module):
    """A model like Hugging Face's: ``model.layers``, a config, and an output that has logits."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=2, num_key_value_heads=2, model_type="tiny")
        self.embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.calls = 0

    def forward(self, input_ids, position_ids, **ignored):
        self.calls += 1
        values, starts = self.embeddings(input_ids), (position_ids == 0).unsqueeze(-1)
        for layer in self.model.layers:
            values = layer(values, starts)
        return SimpleNamespace(logits=self.lm_head(values))


def worker_for(worker, optimizer="sgd", max_grad_norm=0.05, settings=None, cp=1, tp=1):
    """Return a worker as its __init__ leaves it; its meshes span all ranks."""
    module = module_of(worker)
    made = object.__new__(getattr(module, CLASSES[worker]))
    off = {"enabled": False}
    made.cfg = {
        "train_global_batch_size": None,
        "train_micro_batch_size": 2,
        "logprob_batch_size": 2,
        "max_total_sequence_length": LENGTH,
        "dynamic_batching": off,
        "sequence_packing": off,
        "dtensor_cfg": {"sequence_parallel": False},
        **(settings or {}),
    }
    made.enable_seq_packing = made.cfg["sequence_packing"]["enabled"]
    made.rank, made.dtype = torch.distributed.get_rank(), torch.float32
    made.tokenizer = SimpleNamespace(eos_token_id=0)
    made.sampling_params = made.processor = made.moe_mesh = None
    made._is_reward_model = made.is_gemma3 = made.is_vlm = made.autocast_enabled = made.cpu_offload = False
    made.allow_flash_attn_args = True
    made.max_grad_norm = max_grad_norm
    _shard(made, cp, tp)
    made.optimizer = _optimizer(optimizer, made.model)
    made.scheduler = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda step: 1.0 / (1 + step))
    if "timer" in module.__dict__ or hasattr(module, "Timer"):  # after v0.7.0
        made.timer = importlib.import_module("nemo_rl.utils.timer").Timer()
    return made


def _shard(made, cp, tp):
    """Set the meshes, under the worker's own names, and the model on them."""
    made.cp_size, made.tp_size = cp, tp
    made.dp_size = torch.distributed.get_world_size() // (cp * tp)
    make_mesh = _automodel_mesh if "V2" in type(made).__name__ else _mesh
    made.device_mesh, made.dp_cp_mesh, sharded_over = make_mesh(made.dp_size, cp, tp)
    made.dp_mesh, made.tp_mesh, made.cp_mesh = (made.device_mesh[name] for name in ("dp", "tp", "cp"))
    torch.manual_seed(1)
    plan = {"model.layers.*.now": ColwiseParallel(output_layouts=Replicate())} if tp > 1 else None
    if CHECKOUT:
        parallelize = importlib.import_module("nemo_rl.models.dtensor.parallelize")
        made.model = parallelize._parallelize_model(
            CausalLM(), sharded_over, made.tp_mesh, param_dtype=torch.float32, custom_parallel_plan=plan
        )
    else:
        model = parallelize_module(CausalLM(), made.tp_mesh, plan) if plan else CausalLM()
        for layer in model.model.layers:
            fully_shard(layer, mesh=sharded_over)
        made.model = fully_shard(model, mesh=sharded_over)


def _mesh(dp, cp, tp):
    mesh = init_device_mesh("cpu", (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    dp_cp = mesh[("dp", "cp")]._flatten(mesh_dim_name="dp_cp")
    return mesh, dp_cp, dp_cp


def _automodel_mesh(dp, cp, tp):
    """Return Automodel's own meshes, and the one that it shards models over."""
    utils = importlib.import_module("nemo_automodel.components.distributed.mesh_utils")
    config = importlib.import_module("nemo_automodel.components.distributed.config").FSDP2Config(backend="gloo")
    sizes = {"dp_replicate_size": 1, "tp_size": tp, "pp_size": 1, "cp_size": cp, "ep_size": 1}
    mesh, _ = utils.create_device_mesh(config, **sizes, world_size=dp * cp * tp)
    if hasattr(utils, "get_fsdp_dp_mesh"):
        return mesh, mesh["dp_cp"], utils.get_fsdp_dp_mesh(mesh)
    return mesh, mesh["dp_cp"], mesh["dp_replicate", "dp_shard_cp"]


def _optimizer(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1.0)


def parameters(worker):
    """Return the full parameters by name."""
    return {name: one.detach().full_tensor().clone() for name, one in worker.model.named_parameters()}


def in_bins(data, kind, tokens):
    """Return data as the driver gives it to one rank, in bins of `tokens` tokens."""
    arguments = {
        "max_tokens_per_microbatch": tokens,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    if kind == "dynamic_batching":
        (found,), _ = data.shard_by_batch_size(1, dynamic_batching_args={**arguments, "sequence_length_round": 2})
    else:
        more = {"algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 1}
        (found,), _ = data.shard_by_batch_size(1, sequence_packing_args={**arguments, **more})
    return found


def trained(worker, loss, take_step):
    return nemo_rl_steps.trained(worker, lambda: parameters(worker), loss, take_step)


def differences(got, expected, without=()):
    """Return `nemo_rl_steps.differences` of runs that must report the same names, and one loss a step."""
    for ours, theirs in zip(got[0], expected[0], strict=True):
        assert ours.keys() == theirs.keys()
        assert len(ours["global_loss"]) == len(theirs["global_loss"]) == 1
    found = nemo_rl_steps.differences(got, expected, without, CONSTANT)
    del found["keys"]
    return found


def assert_close(ranks, *case):
    for found in ranks:
        assert {name: value for name, value in found[case].items() if value > 1e-5} == {}
