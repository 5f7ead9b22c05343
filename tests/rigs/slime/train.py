"""slime's (or miles') train() and save() on a tiny GPT.

They are real with the folder of a checkout in SLIME_CHECKOUT (neither is on PyPI), and otherwise our imitation. In
either case their surroundings are ours: data, loss, learning rate, log, and the writer of checkpoints.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from megapatch.testing import MegatronLoop, TinyGPT
from rigs.imported import after_megatron
from rigs.megatron.options import Interrupted
from rigs.stand_ins import StandIns
from rigs.variables import folder_in

CHECKOUT = folder_in("SLIME_CHECKOUT")
IMITATIONS = Path(__file__).parents[2] / "imitations"
FRAMEWORK = "miles" if CHECKOUT and (Path(CHECKOUT) / "miles").is_dir() else "slime"
UTILS = f"{FRAMEWORK}.backends.megatron_utils"
ONLY_WITH_GPUS = ("mooncake", "sglang", "sglang_router", "torch_memory_saver")


@after_megatron
def find_slime():
    """Make slime importable: the setup of a rank."""
    sys.path.insert(0, CHECKOUT or str(IMITATIONS))
    if CHECKOUT:
        sys.meta_path.append(StandIns(ONLY_WITH_GPUS, lambda module, name: type(name, (), {})))


@dataclass(frozen=True)
class Fault:
    """Where to raise Interrupted in a call: "data" or "loss", at a microbatch; "scheduler", right after an
    optimizer step. Both are counted over the call from 0."""

    place: str
    index: int = 0


@dataclass
class SlimeLoop:
    """slime's train() and save() for one model, which must be built with ``hooks=False``.

    arguments   more of slime's
    log         by step, on the rank that logs: (loss, gradient norm)
    saved       this rank's parameters when each checkpoint was written
    steps       the number of steps done; the data of the next call begins there
    """

    model: TinyGPT
    num_microbatches: int = 2
    arguments: dict = field(default_factory=dict)
    log: list = field(default_factory=list)
    saved: list = field(default_factory=list)
    steps: int = 0

    def __post_init__(self):
        self.module = importlib.import_module(f"{UTILS}.model")
        args = vars(MegatronLoop(self.model).args) if CHECKOUT else {}
        self.args = SimpleNamespace(**{**args, **self._arguments(), **self.arguments})

    def train(self, steps=2, fault=None, module=None):
        """Train on one rollout of `steps` steps; `module` is the one that train() is taken from."""
        self._take_over()
        self._fault, self._microbatches, self._done = fault, 0, 0
        train = (module or self.module).train
        sizes = [self._global_batch_size()] * steps
        more = {"global_batch_sizes": sizes, "num_rollouts": sizes, "witness_info": None, "attempt": 0}
        train(
            0,
            self.model.chunks,
            self.model.optimizer,
            self,
            [_Rollout(self, steps) for _ in self.model.chunks],
            [self.num_microbatches] * steps,
            *[more[name] for name in inspect.signature(train).parameters if name in more],
        )
        self.steps += steps

    def interrupted_train(self, fault, steps=4):
        with contextlib.suppress(Interrupted):
            self.train(steps, fault)
            raise AssertionError("the call was not interrupted")
        self.steps += self._done

    def save(self, module=None):
        self._take_over()
        (module or self.module).save(self.steps, self.model.chunks, self.model.optimizer, self)

    # ------------------------------------------------------------------------ what slime calls
    def step(self, increment):
        """Step as the learning rate scheduler does, after the optimizer."""
        self._done += 1
        self._raise_at("scheduler", self._done - 1)

    def get_lr(self, param_group):
        return param_group["lr"]

    def state_dict(self):
        return {}

    def _batch(self, data_iterator, *ignored, **also_ignored):
        tokens = next(data_iterator)
        nothing = dict.fromkeys(("packed_seq_params", "full_loss_masks", "multimodal_train_inputs"))
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], **nothing}

    def _loss(self, args, batch, *rest, **ignored):
        self._raise_at("loss", self._microbatches)
        self._microbatches += 1
        loss = torch.nn.functional.cross_entropy(rest[-1].float().flatten(0, 1), batch["labels"].flatten())
        return loss, torch.tensor(1), {"keys": ["loss"], "values": torch.stack([torch.ones(()), loss.detach()])}

    def _log(self, metrics):
        self.log.append((metrics["train/loss"], float(metrics["train/grad_norm"])))

    def _save(self, *args, **kwargs):
        self.saved.append(self.model.parameters())
        if CHECKOUT and self.args.save:
            importlib.import_module("megatron.training.checkpointing").save_checkpoint(*args, **kwargs)

    def _raise_at(self, place, index):
        if self._fault == Fault(place, index):
            raise Interrupted

    # ------------------------------------------------------------------------ what it runs in
    def _take_over(self):
        """Put our functions into slime's module, where another model's may be."""
        if CHECKOUT:
            sys.modules["megatron.training.global_vars"].set_args(self.args)
        else:
            self.module.get_args = lambda: self.args
        self.module.get_batch = self._batch
        self.module.loss_function = self._loss
        self.module.save_checkpoint = self._save
        if FRAMEWORK == "miles":
            self._set_up_miles()
        else:
            self.module.logging_utils.log = lambda args, metrics, step_key: self._log(metrics)

    def _global_batch_size(self):
        """Return the global batch size in microbatches, since the loss is a microbatch's mean."""
        from megatron.core import parallel_state

        return self.num_microbatches * parallel_state.get_data_parallel_world_size()

    def _arguments(self):
        model, ddp = self.model, self.model.ddp_config
        off = (
            "allgather_cp",
            "calculate_per_token_loss",
            "ci_disable_kl_checker",
            "ci_test",
            "debug_disable_optimizer",
            "enable_mtp_training",
            "enable_witness",
            "manual_gc",
            "multi_lora",
            "reset_optimizer_states",
            "save_local_weight_checksum",
            "use_rollout_routing_replay",
        )
        not_given = (
            "ci_load_grad_norm",
            "ci_save_grad_norm",
            "custom_megatron_before_train_step_hook_path",
            "decoder_seq_length",
            "qkv_format",
            "save_debug_train_data",
        )
        return {
            **dict.fromkeys(off, False),
            **dict.fromkeys(not_given),
            "align_grad_reduce": model.align_grad_reduce,
            "align_param_gather": model.align_param_gather,
            "check_for_nan_in_loss_and_grad": True,
            "data_pad_size_multiplier": 1,
            "global_batch_size": self._global_batch_size(),
            "micro_batch_size": 2,
            "overlap_grad_reduce": ddp.overlap_grad_reduce,
            "overlap_param_gather": ddp.overlap_param_gather,
            "rollout_top_p": 1.0,
            "seq_length": model.seq,
            "use_distributed_optimizer": ddp.use_distributed_optimizer,
        }

    def _set_up_miles(self):
        parallel = importlib.import_module(f"{UTILS}.parallel")
        alone = importlib.import_module("miles.utils.ft_utils.process_group_utils").GroupInfo(0, 1, None)
        importlib.import_module("miles.backends.training_utils.parallel").set_parallel_state(
            parallel.create_megatron_parallel_state(alone)
        )

        def log_train_step(loss_dict, grad_norm, **ignored):
            self._log({"train/loss": loss_dict["loss"], "train/grad_norm": grad_norm})

        self.module.log_train_step = log_train_step
        self.module.DumperMegatronUtil = _NoDumper  # of sglang


class _NoDumper:
    def __init__(self, *ignored, **also_ignored):
        pass

    def wrap_forward_step(self, forward_step):
        return forward_step

    def finalize(self, model):
        pass


class _Rollout:
    """The data of one call, which slime resets at its start."""

    def __init__(self, loop, steps):
        self.loop, self.position = loop, None
        self.samples = [
            sample
            for step in range(loop.steps, loop.steps + steps)
            for sample in loop.model.microbatches(step, loop.num_microbatches)
        ]

    def reset(self):
        self.position = 0

    def __next__(self):
        self.loop._raise_at("data", self.position)
        self.position += 1
        return self.samples[self.position - 1]
