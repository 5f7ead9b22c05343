"""What the patches say of code that is like verl's and yet another."""

from __future__ import annotations

import importlib

import pytest

from megapatch.patches.verl import gathered_when_read, overflow_is_skipped, pipeline_seed, weight_sync_resume

NOTHING = "there = 'nothing'"
ENGINE = """
class BaseEngine:
    def train_batch(self, data, loss_function):
        outputs = {{"metrics": self.optimizer_step()}}
        if self.is_mp_src_rank_with_outputs(): return outputs
class MegatronEngine(BaseEngine):
    def optimizer_step(self):
        successful, norm, _ = self.optimizer.step()
{body}
        return norm
    def lr_scheduler_step(self):
        self.{scheduler}.step(1)
"""
RAISE = "        if not successful: raise NotImplementedError"
SEED = """
def set_random_seed(seed):
    {body}
"""
MANAGER = """
def auto_await(function):
    return function
class CheckpointEngineManager:
    @auto_await
    async def update_weights(self):
        await self.abort_replicas()
{body}
"""
RESUME = "        await self.resume_generation_replicas()"
SAVE = """
class MegatronCheckpointManager:
    def save_checkpoint(self, path):
        {body}
"""


CASES = {
    "engine: none": (overflow_is_skipped.diagnose, NOTHING, "absent", "no MegatronEngine"),
    "engine: raises": (
        overflow_is_skipped.diagnose,
        ENGINE.format(body=RAISE, scheduler="lr_scheduler"),
        "needed",
        "ends the job",
    ),
    "engine: skips": (
        overflow_is_skipped.diagnose,
        ENGINE.format(body="        pass", scheduler="lr_scheduler"),
        "fixed",
        "took no step",
    ),
    "engine: raises another": (
        overflow_is_skipped.diagnose,
        ENGINE.format(body="        assert successful", scheduler="lr_scheduler"),
        "unknown",
        "AssertionError",
    ),
    "engine: asks for more": (
        overflow_is_skipped.diagnose,
        ENGINE.format(body="        self.more()", scheduler="lr_scheduler"),
        "unknown",
        "on a stand-in",
    ),
    "engine: another scheduler": (
        overflow_is_skipped.diagnose,
        ENGINE.format(body=RAISE, scheduler="rates"),
        "unknown",
        "lr_scheduler",
    ),
    "seed: none": (pipeline_seed.diagnose, NOTHING, "absent", "no set_random_seed"),
    "seed: one for all": (
        pipeline_seed.diagnose,
        SEED.format(body="model_parallel_cuda_manual_seed(seed)"),
        "needed",
        "the same seed",
    ),
    "seed: by stage": (
        pipeline_seed.diagnose,
        SEED.format(body="model_parallel_cuda_manual_seed(seed + 100 * get_pipeline_model_parallel_rank())"),
        "fixed",
        "depends",
    ),
    "seed: another": (pipeline_seed.diagnose, SEED.format(body="pass"), "unknown", "manual_seed"),
    "sync: none": (weight_sync_resume.diagnose, NOTHING, "absent", "no CheckpointEngineManager"),
    "sync: no finally": (weight_sync_resume.diagnose, MANAGER.format(body=RESUME), "needed", "does not resume"),
    "sync: in a comprehension": (
        weight_sync_resume.diagnose,
        MANAGER.format(body="        await gather(*[one.resume_generation() for one in self.replicas])"),
        "needed",
        "does not resume",
    ),
    "sync: finally": (
        weight_sync_resume.diagnose,
        MANAGER.format(body=f"        try: await self.transfer()\n        finally:\n    {RESUME}"),
        "fixed",
        "even after a failure",
    ),
    "sync: no resume": (
        weight_sync_resume.diagnose,
        MANAGER.format(body="        await self.transfer()"),
        "unknown",
        "found no such call",
    ),
    "sync: no coroutine": (
        weight_sync_resume.diagnose,
        MANAGER.format(body=RESUME).replace("async def", "def").replace("await ", ""),
        "unknown",
        "a coroutine",
    ),
    "save: none": (gathered_when_read.diagnose_save, NOTHING, "absent", "no MegatronCheckpointManager"),
    "save: gathers": (
        gathered_when_read.diagnose_save,
        SAVE.format(body="self.checkpoint_config; self.model.start_param_sync()"),
        "fixed",
        "gathers",
    ),
    "save: does not": (
        gathered_when_read.diagnose_save,
        SAVE.format(body="self.checkpoint_config"),
        "needed",
        "not gathered",
    ),
    "save: another": (gathered_when_read.diagnose_save, SAVE.format(body="pass"), "unknown", "checkpoint_config"),
}


@pytest.mark.parametrize(("diagnose", "source", "kind", "words"), CASES.values(), ids=CASES)
def test_the_verdict(diagnose, source, kind, words, modules):
    verdict = diagnose(importlib.import_module(modules.write(source)))
    assert verdict.kind.value == kind
    assert words in verdict.reason
