"""Verdicts on code that is like AReaL's and yet another."""

from rigs.diagnosed_sources import each_source

from megapatch.patches.areal import (
    aux_loss_scale,
    eval_loss,
    gathered_when_read,
    load_optimizer_state,
    pipeline_seed,
    weight_sync_resume,
)

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
        {export}
        return self.model
"""
ORDINARY = dict(
    seed="self.seed", hook="pass", first="", export="pass", last="self.rollout_engine.continue_generation()"
)
FINALLY = "try: print()\n        finally: self.rollout_engine.continue_generation()"
MANAGER = """
class MegatronCheckpointManager:
    def __init__(self, model):
        self.model = model
    def save_checkpoint(self):
        {}self.generate_state_dict()
"""

LOADS = """
import torch
def load_dist_checkpointing(*args, **kwargs): ...
class MegatronCheckpointManager:
    def generate_state_dict(self, with_model=True, with_optimizer=True, with_rng=True{loading}):
        torch.distributed.barrier()
        return self.optimizer.sharded_state_dict({{}}{given})
    def load_checkpoint(self, local_path, with_model=True, with_optimizer=True, with_rng=True):
        load_dist_checkpointing(self.generate_state_dict(with_model, with_optimizer, with_rng{says}))
"""
EVAL = """
class MegatronEngine:
    def forward_backward_batch(self, microbatches, process_output_fn): ...
    def eval_batch(self, losses):
        self.forward_backward_batch([], lambda loss: losses.append(loss.detach(){copy}))
"""


def engine(**changed):
    return ENGINE.format(**{**ORDINARY, **changed})


GATHERS = "self.model[0].start_param_sync(); "
BY_STAGE = "self.seed + mpu.get_pipeline_model_parallel_rank()"


SOURCES = {
    aux_loss_scale.diagnose: {
        "scale: by hand": (engine(), "needed", "only AReaL's own loss"),
        "scale: set": (engine(hook="config.grad_scale_func = 1"), "fixed", "sets"),
    },
    eval_loss.diagnose: {
        "eval: as they are": (EVAL.format(copy=""), "needed", "has divided"),
        "eval: copies": (EVAL.format(copy=".clone()"), "fixed", "keeps copies"),
    },
    load_optimizer_state.diagnose: {
        "loads: as it saves": (LOADS.format(loading="", given="", says=""), "needed", "as a save does"),
        "loads: says so": (
            LOADS.format(loading=", loading=False", given=", is_loading=loading", says=", loading=True"),
            "fixed",
            "says so",
        ),
    },
    pipeline_seed.diagnose: {
        "seed: one": (engine(), "needed", "the same seed"),
        "seed: by stage": (engine(seed=BY_STAGE), "fixed", "depends"),
    },
    weight_sync_resume.diagnose: {
        "sync: at the end": (engine(), "needed", "does not continue"),
        "sync: finally": (engine(last=FINALLY), "fixed", "even after"),
        "sync: never": (engine(last="pass"), "unknown", "then continue_generation"),
    },
    gathered_when_read.PATCH.sites[0].diagnose: {
        "reads: shards": (engine(), "needed", "are not gathered"),
        "reads: one gathers": (engine(first=GATHERS), "needed", "_save_model_to_hf() reads"),
        "reads: both gather": (
            engine(first=GATHERS, export="self.model[0].start_param_sync()"),
            "fixed",
            "gathers",
        ),
        "reads: a log that mentions a gather": (
            engine(first="print('call start_param_sync() before'); "),
            "needed",
            "are not gathered",
        ),
    },
    gathered_when_read.PATCH.sites[1].diagnose: {
        "saves: shards": (MANAGER.format(""), "needed", "are not gathered"),
        "saves: gathers": (MANAGER.format(GATHERS), "fixed", "gathers"),
    },
}
NAMES = {
    "eval: as they are": "but append loss losses microbatches",
    "scale: by hand": "MegatronEngine SimpleNamespace __init__ dtype finalize_model_grads_func "
    "forward_backward_batch get_loss_scale get_model_config initialize model optimizer train_batch types",
    "loads: as it saves": "but args kwargs",
    "seed: one": "MegatronEngine SimpleNamespace create_process_group model_parallel_cuda_manual_seed "
    "own_global_group seed tensor_parallel types",
    "sync: at the end": "MegatronEngine SimpleNamespace _update_bucket_weights_from_distributed "
    "_update_weights_from_disk _update_weights_from_distributed acquire continue_generation engine_lock "
    "pause_generation release types update_weights",
}
test_the_verdict = each_source(SOURCES, NAMES)
