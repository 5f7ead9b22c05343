"""Megatron-Bridge's own train() on a tiny GPT, without the gigabytes that Bridge depends on.

Its training, configuration and global state are real; the data, the loss and the learning rate are ours.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed

from megapatch._python.finding import find_module
from megapatch.testing import TinyGPT, init_parallel, run_ranks, tiny_gpt
from megapatch.testing._data import forward_step
from rigs.megatron.options import BOTH, Interrupted
from rigs.stand_ins import BRIDGE, BarePackages, StandIns

MODULE = f"{BRIDGE}.training.train"
ALIGNED = {**BOTH, "align_param_gather": True}
MXFP8 = {**BOTH, "config": {"fp8_recipe": "mxfp8"}}  # the recipe alone: nothing is MXFP8 here
STAND_INS = (
    f"{BRIDGE}.models",
    f"{BRIDGE}.peft",
    "PIL",
    "datasets",
    "megatron.energon",
    "modelopt",
    "omegaconf",
    "regex",
    "six",
    "torch.utils.tensorboard",
    "tqdm",
    "transformers",
)
needs_bridge = pytest.mark.skipif(find_module(BRIDGE) is None, reason="Megatron-Bridge is not installed")


def ranks(job, *args, world_size=2, **options):
    return run_ranks(job, world_size, *args, setup=find_bridge, **options)


def new_loop(options, layout=None, **more):
    init_parallel(**(layout or {}))
    return BridgeLoop(tiny_gpt(layers=4, hooks=False, **options), **more)


def timers_running(loop):
    return [name for name, timer in loop.state.timers._timers.items() if timer._started]


def find_bridge():
    """Make Bridge importable: the setup of a rank."""
    sys.meta_path[:0] = [BarePackages(), StandIns(STAND_INS, _make)]


def _make(module, name):
    if name == "get_tensor_shapes_adjust_fn_for_distillation":
        return lambda *ignored, **also_ignored: None  # as the real one's for a model that is not distilled
    return _Unusable(name, (), {})


class _Unusable(type):
    """A class to inherit from and to check for; it is never instantiated."""

    def __call__(cls, *ignored, **also_ignored):
        raise AssertionError(f"{cls.__name__} is a stand-in")


@dataclass(frozen=True)
class Fault:
    """Where to raise Interrupted in a call: "data" or "loss", at a microbatch of the call, counted from 0; or
    "evaluation", when its data is requested."""

    place: str
    index: int = 0


@dataclass
class BridgeLoop:
    """Bridge's train() and the global state around it, for one model, which must be built with ``hooks=False``.

    settings   more of Bridge's configuration: {"train.manual_gc": True}
    losses     the mean loss per token of each step, as train() computes it
    state      Bridge's GlobalState
    module     Bridge's module of train()
    """

    model: TinyGPT
    num_microbatches: int = 2
    rerun_mode: str = "disabled"
    settings: dict = field(default_factory=dict)
    losses: list = field(default_factory=list)

    def __post_init__(self):
        self.module = importlib.import_module(MODULE)
        self.setup = importlib.import_module(f"{BRIDGE}.training.setup")
        self.state = importlib.import_module(f"{BRIDGE}.training.state").GlobalState()
        self.state.cfg = self._config()
        groups = importlib.import_module("megatron.core.process_groups_config")
        self.process_groups = groups.ProcessGroupCollection.use_mpu_process_groups()
        self._set_up_core()
        self.manager = self._checkpoint_manager()
        self.callbacks = self.module.CallbackManager()
        self.callbacks.register("on_train_step_end", self._step_done)

    @property
    def steps(self):
        """The number of steps done; the data of the next call begins there."""
        return self.state.train_state.step

    def train(self, steps=2, fault=None, module=None):
        """Call train() of `module` for `steps` steps, and return their losses."""
        from megatron.core.rerun_state_machine import RerunDataIterator

        first = len(self.losses)
        self._fault, self._microbatches = fault, 0
        self.state.cfg.train.train_iters = self.steps + steps
        (module or self.module).train(
            self._forward_step,
            self.model.chunks,
            self.model.optimizer,
            SimpleNamespace(step=lambda increment: None),
            RerunDataIterator(self._data(steps)),
            RerunDataIterator(self._evaluation_data()),
            self.state,
            self.manager,
            self.process_groups,
            callback_manager=self.callbacks,
        )
        losses = torch.tensor(self.losses[first:])
        torch.distributed.all_reduce(losses, torch.distributed.ReduceOp.MAX)
        return losses.tolist()

    def interrupted_train(self, fault, steps=4):
        with contextlib.suppress(Interrupted):
            self.train(steps, fault)
            raise AssertionError("the call was not interrupted")

    def evaluate_each_step(self):
        """Evaluate on one batch after each step."""
        cfg = self.state.cfg
        validation = getattr(cfg, "validation", cfg.train)  # to 0.3 among the settings for training
        validation.eval_interval, validation.eval_iters = 1, 1
        if hasattr(validation, "eval_global_batch_size"):
            validation.eval_micro_batch_size = cfg.train.micro_batch_size
            validation.eval_global_batch_size = cfg.train.global_batch_size
        self.state.train_state.do_valid = True

    # ------------------------------------------------------------------------ what train() calls
    def _data(self, steps):
        samples = [
            sample
            for step in range(self.steps, self.steps + steps)
            for sample in self.model.microbatches(step, self.num_microbatches)
        ]
        for index, sample in enumerate(samples):
            self._raise_at("data", index)
            yield sample

    def _evaluation_data(self):
        while True:
            self._raise_at("evaluation", 0)
            yield from self.model.microbatches(0, self.num_microbatches)

    def _forward_step(self, data_iterator, model):
        output, usual = forward_step(data_iterator, model)

        def loss_function(output):
            index, self._microbatches = self._microbatches, self._microbatches + 1
            self._raise_at("loss", index)
            return usual(output)

        return output, loss_function

    def _step_done(self, context):
        self.losses.append(float(context.loss_dict.get("loss", 0.0)))  # only the last pipeline stage has it

    def _raise_at(self, place, index):
        if self._fault == Fault(place, index):
            raise Interrupted

    # ------------------------------------------------------------------------ what it runs in
    def _config(self):
        """Return Bridge's configuration. The model's is Megatron's own: what Bridge calls a provider is one."""
        module, model = importlib.import_module(f"{BRIDGE}.training.config"), self.model
        dp = importlib.import_module("megatron.core.parallel_state").get_data_parallel_world_size()
        provider = model.config
        provider.seq_length, provider.vocab_size = model.seq, model.vocab
        provider.make_vocab_size_divisible_by = 1
        config = module.ConfigContainer(
            train=module.TrainingConfig(
                micro_batch_size=2, global_batch_size=2 * self.num_microbatches * dp, train_iters=1
            ),
            model=provider,
            optimizer=model.optimizer.config,
            ddp=model.ddp_config,
            scheduler=module.SchedulerConfig(),
            dataset=SimpleNamespace(dataloader_type="single"),
            logger=module.LoggerConfig(log_interval=1_000_000),
            tokenizer=None,
            checkpoint=module.CheckpointConfig(save=None),
        )
        config.data_parallel_size = dp
        for path, value in self.settings.items():
            section, _, name = path.partition(".")
            assert hasattr(getattr(config, section), name), path
            setattr(getattr(config, section), name, value)
        return config

    def _set_up_core(self):
        """Make Megatron's globals, and the hooks on the model's config, as Bridge's setup does before train()."""
        microbatches = importlib.import_module("megatron.core.num_microbatches_calculator")
        microbatches.destroy_num_microbatches_calculator()
        train = self.state.cfg.train
        microbatches.init_num_microbatches_calculator(
            rank=0,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            data_parallel_size=self.state.cfg.data_parallel_size,
            **({"rampup_batch_size": None} if hasattr(train, "rampup_batch_size") else {}),
        )
        rerun = importlib.import_module("megatron.core.rerun_state_machine")
        rerun.destroy_rerun_state_machine()
        rerun.initialize_rerun_state_machine(mode=rerun.RerunMode(self.rerun_mode))
        self.setup._update_model_config_funcs(
            self.model.chunks,
            self.model.config,
            self.model.ddp_config,
            self.model.optimizer,
            align_grad_reduce=self.model.align_grad_reduce,
            pg_collection=self.process_groups,
        )

    def _checkpoint_manager(self):
        checkpointing = importlib.import_module(f"{BRIDGE}.training.checkpointing")
        create = getattr(checkpointing, "create_checkpoint_manager", None)
        return create(self.state.cfg.checkpoint) if create else {}  # to 0.3 a dictionary
