"""slime's own training actor as the trainer of a pump, on one rank and on two; without a checkout, our imitation.

Each rank has a pump and a group of its own, whose calls are made in this process; gradients are reduced over both.
"""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from rigs.cells import cells_of
from rigs.megatron.options import BOTH, GRADS, attempt
from rigs.slime.group import Loop, group_for
from rigs.slime.train import FRAMEWORK, find_slime
from rigs.streaming.fails_once import FailsOnce

from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump
from megapatch.streaming.slime import GroupTrainer, GroupWeights
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(FRAMEWORK == "miles", reason="the checkout is one of miles"),
]

STEPS, MICROBATCHES, GROUPS = 2, 4, 2  # steps, and their microbatches on a rank and prompt groups
OPTIONS = {"plain": {}, "overlap": GRADS, "sharded": BOTH}


class Trainer(FailsOnce, GroupTrainer):
    pass


class Groups(RolloutBuffer):
    def claim(self, group):
        return super().claim(group)[0]


def by_slime(options):
    model = tiny_gpt(hooks=False, **options)
    loop = Loop(model, num_microbatches=MICROBATCHES)
    loop.train(STEPS)
    return model.parameters(), loop.log[-1:]


def by_pump(options):
    """The same steps, a prompt group at a time; the second group fails at first."""
    model = tiny_gpt(hooks=False, **options)
    rig, loop, group = group_for(model, MICROBATCHES)
    trainer, weights, buffer = Trainer(group, loop._global_batch_size()), GroupWeights(group), Groups()
    config = StreamingConfig(generations_per_prompt=1, target_prompt_groups_per_step=GROUPS, max_staleness=STEPS)
    pump = TrainPump(config, trainer, buffer, weights, weights)
    batches = [model.microbatches(step, MICROBATCHES) for step in range(STEPS)]
    size = MICROBATCHES // GROUPS
    groups = [batch[at : at + size] for batch in batches for at in range(0, MICROBATCHES, size)]

    async def train():
        for number, group in enumerate(groups):
            await buffer.put(number, {"group_id": number, "weight_version": 0}, group)
        with pytest.raises(ValueError, match="the second group"):
            await pump.step()
        failed = pump.version, max(float(value.abs().max()) for value in model.gradients().values())
        await pump.run(STEPS)
        return failed

    failed = asyncio.run(train())
    held = [value.detach() for chunk in model.chunks for value in chunk.parameters()]
    pushed = rig.pushed[-1]
    return model.parameters(), {
        "failed": failed,
        "metrics": trainer.found,
        "pushed": torch.equal(in_order(pushed), in_order(held)) if pushed else None,  # by one rank alone
        "version": weights.version,
        "samples": loop._done,
    }


def in_order(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).sort()[0]


def cell(options):
    expected, log = by_slime(options)
    ours, found = by_pump(options)
    difference = max(float((ours[name] - value).abs().max()) for name, value in expected.items())
    return {**found, "difference": difference, "log": log}


def offloading():
    _, loop, group = group_for(tiny_gpt(hooks=False), MICROBATCHES)
    loop.args.offload_train = True
    return attempt(GroupTrainer(group, 8).begin_train_step)


def compared(rank, world_size):
    init_parallel()
    yield "offloading", offloading
    for name, options in OPTIONS.items():
        yield name, partial(cell, options)


ranks = cells_of(compared, 2, setup=find_slime)


@pytest.mark.parametrize("options", OPTIONS)
def test_group_by_group_it_is_slimes_own_step_also_after_a_failure(ranks, options):
    for found in (rank[options] for rank in ranks):
        assert found["failed"] == (0, 0.0)
        assert found["difference"] <= 1e-5
        assert (found["version"], found["samples"]) == (STEPS, STEPS)
        for loss, norm in found["log"]:
            assert found["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert found["metrics"].get("loss", loss) == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("options", OPTIONS)
def test_engines_get_what_the_step_has_made(ranks, options):
    first, second = (rank[options]["pushed"] for rank in ranks)
    assert first is True and second in (True, None)


def test_offloading_is_refused(ranks):
    for found in ranks:
        kind, text = found["offloading"]
        assert kind == "MisuseError" and "--offload-train would offload the gradients" in text
