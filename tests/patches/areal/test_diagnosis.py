"""What the patches say of code that is like AReaL's and yet another."""

from __future__ import annotations

from rigs.diagnosed_sources import NOTHING, assert_verdict_of_source, each_source

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


def engine(**changed):
    return ENGINE.format(**{**ORDINARY, **changed})


GATHERS = "self.model[0].start_param_sync(); "
BY_STAGE = "self.seed + mpu.get_pipeline_model_parallel_rank()"


SOURCES = {
    aux_loss_scale.diagnose: {
        "scale: none": (NOTHING, "absent", "no MegatronEngine"),
        "scale: by hand": (engine(), "needed", "only AReaL's own loss"),
        "scale: set": (engine(hook="config.grad_scale_func = 1"), "fixed", "sets"),
        "scale: other": ("class MegatronEngine: ...", "unknown", "train_batch"),
    },
    pipeline_seed.diagnose: {
        "seed: none": (NOTHING, "absent", "no MegatronEngine"),
        "seed: one": (engine(), "needed", "the same seed"),
        "seed: by stage": (engine(seed=BY_STAGE), "fixed", "depends"),
        "seed: other": (engine(seed="1"), "unknown", "seed"),
    },
    weight_sync_resume.diagnose: {
        "sync: none": (NOTHING, "absent", "no MegatronEngine"),
        "sync: at the end": (engine(), "needed", "does not continue"),
        "sync: finally": (engine(last=FINALLY), "fixed", "even after"),
        "sync: never": (engine(last="pass"), "unknown", "then continue_generation"),
        "sync: other": ("class MegatronEngine: ...", "unknown", "update_weights"),
    },
    gathered_when_read.diagnose_engine: {
        "reads: none": (NOTHING, "absent", "this version has no"),
        "reads: shards": (engine(), "needed", "are not gathered"),
        "reads: gathers": (engine(first=GATHERS), "fixed", "gathers"),
    },
    gathered_when_read.diagnose_save: {
        "saves: shards": (MANAGER.format(""), "needed", "are not gathered"),
        "saves: gathers": (MANAGER.format(GATHERS), "fixed", "gathers"),
    },
}


@each_source(SOURCES)
def test_the_verdict(source_case, modules):
    assert_verdict_of_source(source_case, modules)
