"""Verdicts on code that is like verl's and yet another; and a mock in the place of a schedule."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from rigs.diagnosed_sources import each_source

from megapatch.patches.verl import (
    gathered_when_read,
    overflow_is_skipped,
    pipeline_seed,
    schedule_after_load,
    training_hooks,
    weight_sync_resume,
)

ENGINE = """
class MegatronEngine:
    def optimizer_step(self):
        successful, norm, _ = self.optimizer.step()
{body}
        return norm
    def lr_scheduler_step(self):
        self.lr_scheduler.step(1)
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
    def __init__(self, model): self.model = model
    def save_checkpoint(self, path):
        {body}
"""
LOAD = """
class MegatronCheckpointManager:
    def __init__(self, {option}): self.{option} = {option}
    def load_checkpoint(self, path):
        if {condition}: {body}
"""
HOOKS = """
class DDP:
    def no_sync(self): ...
def register_megatron_training_hooks(model, optimizer):
    for chunk in model:
        if isinstance(chunk, DDP) and chunk.ddp_config.overlap_grad_reduce:
            {body}
"""
ASSERTS = "assert chunk.config.no_sync_func is None"
SETS = "chunk.config.no_sync_func = [each.no_sync for each in model]"
OPTION = "use_checkpoint_opt_param_scheduler"
LOADS = "self.lr_scheduler.load_state_dict(path)"
FOR_ALL = "model_parallel_cuda_manual_seed(seed)"
BY_STAGE = "model_parallel_cuda_manual_seed(seed + 100 * get_pipeline_model_parallel_rank())"
NO_RESUME = "        await self.transfer()"
NO_COROUTINE = MANAGER.format(body=RESUME).replace("async def", "def").replace("await ", "")
GATHERS = "self.checkpoint_config; self.model.start_param_sync()"
ANOTHER = MANAGER.format(body=RESUME).replace("auto_await", "awaited")
COMPREHENSION = "        await gather(*[one.resume_generation() for one in self.replicas])"
FINALLY = f"        try: await self.transfer()\n        finally:\n    {RESUME}"


def manager(condition=f"self.{OPTION}"):
    return LOAD.format(option=OPTION, condition=condition, body=LOADS)


def engine(body):
    return ENGINE.format(body=body)


SOURCES = {
    overflow_is_skipped.diagnose: {
        "engine: raises": (engine(RAISE), "needed", "ends the job"),
        "engine: skips": (engine("        pass"), "fixed", "took no step"),
        "engine: raises another": (engine("        assert successful"), "unknown", "AssertionError"),
        "engine: asks for more": (engine("        self.more()"), "unknown", "on a stand-in"),
    },
    pipeline_seed.diagnose: {
        "seed: one for all": (SEED.format(body=FOR_ALL), "needed", "the same seed"),
        "seed: not by Megatron": (SEED.format(body="pass"), "unknown", "model_parallel_cuda_manual_seed"),
        "seed: by stage": (SEED.format(body=BY_STAGE), "fixed", "depends"),
    },
    schedule_after_load.diagnose: {
        "load: by option": (manager(), "needed", "begins its schedule again"),
        "load: always": (manager(condition="self.lr_scheduler"), "unknown", OPTION),
    },
    training_hooks.diagnose: {
        "hooks: once": (HOOKS.format(body=f"{ASSERTS}; {SETS}"), "needed", "the second chunk and at the second"),
        "hooks: again": (HOOKS.format(body=SETS), "fixed", "several chunks and several calls"),
        "hooks: none": (HOOKS.format(body="pass"), "unknown", "to set no_sync_func"),
    },
    weight_sync_resume.diagnose: {
        "sync: no finally": (MANAGER.format(body=RESUME), "needed", "does not resume"),
        "sync: in a comprehension": (MANAGER.format(body=COMPREHENSION), "needed", "does not resume"),
        "sync: finally": (MANAGER.format(body=FINALLY), "fixed", "even after a failure"),
        "sync: no resume": (MANAGER.format(body=NO_RESUME), "unknown", "found no such call"),
        "sync: behind another decorator": (ANOTHER, "unknown", "behind @auto_await"),
        "sync: no coroutine": (NO_COROUTINE, "unknown", "a coroutine"),
    },
    gathered_when_read.PATCH.sites[0].diagnose: {
        "save: gathers": (SAVE.format(body=GATHERS), "fixed", "gathers"),
        "save: does not": (SAVE.format(body="self.checkpoint_config"), "needed", "not gathered"),
    },
}
NAMES = {
    "hooks: once": "but chunk each no_sync",
    "engine: raises": "but norm successful",
    "seed: one for all": "model_parallel_cuda_manual_seed seed set_random_seed",
    "load: by option": "but path",
    "sync: no finally": "but abort_replicas function",
}
test_the_verdict = each_source(SOURCES, NAMES)


@pytest.mark.parametrize(("overrides", "loads"), [(Mock(), False), (False, False), (True, True)])
def test_a_schedule_is_loaded_if_it_overrides_and_a_mock_does_not(overrides, loads):
    manager = SimpleNamespace(lr_scheduler=Mock(override_opt_param_scheduler=overrides), **{OPTION: False})
    load_checkpoint = schedule_after_load.load_with_schedule(lambda self: getattr(self, OPTION))
    assert load_checkpoint(manager) is loads
