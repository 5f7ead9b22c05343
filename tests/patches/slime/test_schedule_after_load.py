"""A resumed slime job is at its checkpoint's step of the schedule, which slime's own code sets up and loads."""

import importlib
from types import SimpleNamespace
from unittest import mock

import pytest
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED, linear_schedule
from rigs.slime.train import UTILS, find_slime

from megapatch.patches._diagnosis import reads_in_order
from megapatch.patches.slime.schedule_after_load import BATCH
from megapatch.testing import init_parallel, tiny_gpt

ITERATIONS, SAMPLES = 3, 8


def resumed(rank, world_size):
    """By whether the optimizer is loaded: the schedule's step, and the learning rate."""
    init_parallel()
    module = importlib.import_module(f"{UTILS}.model")
    found = {"advances": bool(reads_in_order(module.initialize_model_and_optimizer, BATCH))}
    for has_optimizer in (True, False):
        model = tiny_gpt(optimizer="adam", lr=0.1, optim={"min_lr": 0.0})
        schedule = linear_schedule(model.optimizer, steps=100, max_lr=0.1)

        def load(model, optimizer, schedule, *args, has_optimizer=has_optimizer, **kwargs):
            if has_optimizer:
                saved = linear_schedule(SimpleNamespace(param_groups=[]), steps=100, max_lr=0.1)
                saved.step(increment=ITERATIONS * SAMPLES)
                schedule.load_state_dict(saved.state_dict())
            return ITERATIONS, 0

        made = (model.chunks, model.optimizer, schedule)
        with (
            mock.patch.object(module, "setup_model_and_optimizer", return_value=made),
            mock.patch.object(module, "load_checkpoint", load),
            mock.patch.object(module, "clear_memory"),
        ):
            module.initialize_model_and_optimizer(SimpleNamespace(global_batch_size=SAMPLES))
        found[has_optimizer] = schedule.num_steps, round(model.optimizer.param_groups[0]["lr"], 6)
    return found


def resumed_here(**env):
    (found,) = run_with_megatron(resumed, 1, setup=find_slime, env=env)
    if not found.pop("advances"):
        pytest.skip("this release does not advance the schedule")
    return found


def test_without_the_patch_the_schedule_is_at_twice_its_step():
    assert resumed_here(**UNPATCHED) == {True: (48, 0.052), False: (24, 0.076)}


def test_a_resumed_job_is_at_its_checkpoints_step():
    assert resumed_here() == {True: (24, 0.076), False: (24, 0.076)}
