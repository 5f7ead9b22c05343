"""What the patches say of code that is like AReaL's and yet another."""

from __future__ import annotations

import importlib

import pytest

from megapatch.patches.areal import aux_loss_scale, gathered_when_read, pipeline_seed, weight_sync_resume

ENGINE = """
import types
mpu = tensor_parallel = types.SimpleNamespace()
def get_model_config(model): ...
class MegatronEngine:
    def __init__(self):
        self.dtype = self.model = None
    def create_process_group(self):
        self.own_global_group = True
        tensor_parallel.model_parallel_cuda_manual_seed({seed})
    def initialize(self, config):
        config.finalize_model_grads_func = print
        {hook}
    def train_batch(self):
        self.forward_backward_batch(self.optimizer.get_loss_scale())
    def update_weights(self):
        self._update_weights_from_distributed()
        self._update_weights_from_disk()
    def _update_bucket_weights_from_distributed(self):
        self.engine_lock.acquire()
        self.engine_lock.release()
    def _update_weights_from_distributed(self):
        {first}self.rollout_engine.pause_generation()
        {last}
    def _update_weights_from_disk(self):
        self.rollout_engine.pause_generation()
        {last}
    def _save_model_to_hf(self):
        return self.model
"""
ORDINARY = dict(seed="self.seed", hook="pass", first="", last="self.rollout_engine.continue_generation()")
FINALLY = "try: print()\n        finally: self.rollout_engine.continue_generation()"
MANAGER = "class MegatronCheckpointManager:\n    def save_checkpoint(self):\n        {}self.generate_state_dict()"
NOTHING = "there = 'nothing'"


def engine(**changed):
    return ENGINE.format(**{**ORDINARY, **changed})


CASES = {
    "scale: none": (aux_loss_scale.diagnose, NOTHING, "absent", "no MegatronEngine"),
    "scale: by hand": (aux_loss_scale.diagnose, engine(), "needed", "only AReaL's own loss"),
    "scale: set": (aux_loss_scale.diagnose, engine(hook="config.grad_scale_func = 1"), "fixed", "sets"),
    "scale: other": (aux_loss_scale.diagnose, "class MegatronEngine: ...", "unknown", "train_batch"),
    "seed: none": (pipeline_seed.diagnose, NOTHING, "absent", "no MegatronEngine"),
    "seed: one": (pipeline_seed.diagnose, engine(), "needed", "the same seed"),
    "seed: by stage": (
        pipeline_seed.diagnose,
        engine(seed="self.seed + mpu.get_pipeline_model_parallel_rank()"),
        "fixed",
        "depends",
    ),
    "seed: other": (pipeline_seed.diagnose, engine(seed="1"), "unknown", "seed"),
    "sync: none": (weight_sync_resume.diagnose, NOTHING, "absent", "no MegatronEngine"),
    "sync: at the end": (weight_sync_resume.diagnose, engine(), "needed", "does not continue"),
    "sync: finally": (weight_sync_resume.diagnose, engine(last=FINALLY), "fixed", "even after"),
    "sync: never": (weight_sync_resume.diagnose, engine(last="pass"), "unknown", "then continue_generation"),
    "sync: other": (weight_sync_resume.diagnose, "class MegatronEngine: ...", "unknown", "update_weights"),
    "reads: none": (gathered_when_read.diagnose_engine, NOTHING, "absent", "this version has no"),
    "reads: shards": (gathered_when_read.diagnose_engine, engine(), "needed", "are not gathered"),
    "reads: gathers": (
        gathered_when_read.diagnose_engine,
        engine(first="self.model[0].start_param_sync(); "),
        "fixed",
        "gathers",
    ),
    "saves: shards": (gathered_when_read.diagnose_save, MANAGER.format(""), "needed", "are not gathered"),
    "saves: gathers": (
        gathered_when_read.diagnose_save,
        MANAGER.format("self.model[0].start_param_sync(); "),
        "fixed",
        "gathers",
    ),
}


@pytest.mark.parametrize(("diagnose", "source", "kind", "words"), CASES.values(), ids=CASES)
def test_the_verdict(diagnose, source, kind, words, modules):
    verdict = diagnose(importlib.import_module(modules.write(source)))
    assert verdict.kind.value == kind
    assert words in verdict.reason
