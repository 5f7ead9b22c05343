"""Megatron-Bridge's own saves and loads of a `BridgeLoop`, with its schedule, in a folder of torch's format.

Of a run's configuration only what a load asks for is written: a tiny GPT's is not one of Bridge's.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import yaml

from megapatch._verify.checks.loads import SCHEDULE
from rigs.megatron.bridge import BRIDGE, new_loop
from rigs.megatron.options import ADAM

OPTIONS = {**ADAM, "use_distributed_optimizer": True}
WRITTEN = {
    "model": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
    "checkpoint": {"save_optim": True, "save_rng": False, "fully_parallel_save": False},
}


class BridgeRun:
    """A trainer of Bridge's: training steps, saves and loads."""

    def __init__(self, folder, pretrained=None):
        self.checkpointing = importlib.import_module(f"{BRIDGE}.training.checkpointing")
        self.checkpointing.save_sharded_modelopt_state = lambda *ignored: None
        scheduler = importlib.import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
        self.loop = new_loop(OPTIONS)
        self.loop.state.cfg.to_yaml = lambda file: Path(file).write_text(yaml.safe_dump(WRITTEN))
        self.schedule = scheduler(self.loop.model.optimizer, **{**SCHEDULE, "max_lr": ADAM["lr"]})
        self.settings = self.loop.state.cfg.checkpoint
        self.settings.load, self.settings.pretrained_checkpoint = str(folder), pretrained
        self.settings.save_rng = self.settings.load_rng = False

    def save(self, **options):
        """Save, and return what was saved."""
        self.settings.save = self.settings.load
        self._call(self.checkpointing.save_checkpoint, 0, **options)
        self.settings.save = None  # or train() saves at its end
        return self.found()

    def load(self):
        self._call(self.checkpointing.load_checkpoint)

    def _call(self, function, *more, **options):
        model = self.loop.model
        function(self.loop.state, model.chunks, model.optimizer, self.schedule, *more, **options)

    def found(self):
        """Return the counters, and copies of the parameters and first moments."""
        state = self.loop.state.train_state
        moments = [
            value["exp_avg"].clone()
            for child in self.loop.model.optimizer.chained_optimizers
            for value in child.optimizer.state.values()
        ]
        return SimpleNamespace(
            step=state.step,
            samples=state.consumed_train_samples,
            parameters={name: value.clone() for name, value in self.loop.model.parameters().items()},
            moments=moments,
        )
