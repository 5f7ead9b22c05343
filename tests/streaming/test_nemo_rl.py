"""NeMo-RL's own policies, replay buffer and synchronizers as a pump's parts; without a checkout, our imitations.

Every rank runs a pump, as it runs the driver's program in tests/rigs/nemo_rl/policy.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
from rigs.cells import cells_of
from rigs.nemo_rl.policy import POLICIES, find_policies, loss, policy_for, samples, sliced, whole
from rigs.nemo_rl.replay_buffer import Recorder, filled, needs_replay_buffer
from rigs.nemo_rl.steps import SIZE
from rigs.nemo_rl.weight_sync import find as find_weight_sync
from rigs.nemo_rl.weight_sync import has_synchronizers, synchronizer
from rigs.nemo_rl.worker import CHECKOUT, GPT
from rigs.streaming.fails_once import FailsOnce

from megapatch.errors import MisuseError
from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump
from megapatch.streaming.nemo_rl import InFlightUpdates, PolicyTrainer
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

pytestmark = pytest.mark.thorough

STEPS, GROUPS = 2, (4, 4)  # steps, and samples of each prompt group on a rank
REFRESHED = {"refresh_policy_logprobs": True}
if CHECKOUT:  # the imitation has no reference model
    REFRESHED["refresh_reference_logprobs"] = True
SUMS = ("num_valid_samples", "approx_entropy", "token_mult_prob_error", "loss")


# ------------------------------------------------------------------------------------------ the trainer
class Trainer(FailsOnce, PolicyTrainer):
    pass


class Groups(RolloutBuffer):
    """Each sample is a prompt group."""

    def claim(self, group):
        return super().claim(group)[0]


class Synced:
    """A synchronizer, and a manager of rollouts."""

    def __init__(self):
        self.syncs, self.told = 0, []

    def sync_weights(self):
        self.syncs += 1

    def set_weight_version(self, version):
        self.told.append(version)


def pumped(name, **settings):
    """Train on all groups; return the metrics of the last step, the parameters, and what else is told."""
    model = tiny_gpt(**GPT)
    policy = policy_for(model, name)
    ranks = policy.sharding_annotations.get_axis_size("data_parallel")
    trainer, synced, buffer = Trainer(policy, loss(), gbs=SIZE * ranks), Synced(), Groups()
    config = StreamingConfig(
        generations_per_prompt=1, target_prompt_groups_per_step=len(GROUPS), max_staleness=STEPS, **settings
    )
    pump = TrainPump(config, trainer, buffer, synced, InFlightUpdates(synced))

    async def train():
        for step in range(STEPS):
            for number, group in enumerate(sliced(policy, samples(policy, step, SIZE), GROUPS)):
                key = step, number
                await buffer.put(key, {"group_id": key, "weight_version": 0}, group)
            if step == 0:
                with pytest.raises(ValueError, match="the second group"):
                    await pump.step()
                failed = pump.version
            await pump.step()
        return failed

    return {
        "failed at": asyncio.run(train()),
        "told": (synced.syncs, synced.told),
        "metrics": trainer.found,
        "parameters": model.parameters(),
    }


def by_nemo_rl(name, refreshed=False):
    model = tiny_gpt(**GPT)
    policy = policy_for(model, name)
    for step in range(STEPS):
        data = samples(policy, step, SIZE)
        if refreshed:
            data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
        if refreshed and "refresh_reference_logprobs" in REFRESHED:
            found = policy.get_reference_policy_logprobs(data)
            data["reference_policy_logprobs"] = found["reference_logprobs"]
        result = whole(policy, data)
    return result, model.parameters()


def cell(name, **settings):
    found = pumped(name, **settings)
    result, parameters = by_nemo_rl(name, refreshed=bool(settings))
    ours = found.pop("parameters")
    found["difference"] = max(float((ours[key] - value).abs().max()) for key, value in parameters.items())
    fresh = tiny_gpt(**GPT).parameters()
    found["moved"] = max(float((ours[key] - value).abs().max()) for key, value in fresh.items())
    found["expected"] = float(result["loss"]), float(result["grad_norm"])
    sums = {name: sum(map(float, values)) for name, values in result["all_mb_metrics"].items() if name in SUMS}
    found["sums"] = sums, {name: found["metrics"][name] for name in sums}
    return found


def compared(rank, world_size):
    with contextlib.redirect_stdout(None):
        for layout, sizes in {"dp2": {}, "pp2": {"pp": 2}}.items():
            init_parallel(**sizes)
            for name in POLICIES:
                yield (name, layout), partial(cell, name)
        init_parallel()
        for name in POLICIES:
            yield (name, "refreshed"), partial(cell, name, **REFRESHED)


ranks = cells_of(compared, 2, setup=find_policies)


def check(found):
    assert found["failed at"] == 0
    assert found["told"] == (STEPS, [1, 2])
    assert found["difference"] <= 1e-5 < 1e-3 < found["moved"]
    assert (found["metrics"]["loss"], found["metrics"]["grad_norm"]) == pytest.approx(found["expected"], rel=1e-4)
    expected, ours = found["sums"]
    assert ours == pytest.approx(expected, rel=1e-4) and expected


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
@pytest.mark.parametrize("name", POLICIES)
def test_group_by_group_it_is_the_policys_own_step_also_after_a_failure(ranks, name, layout):
    for found in ranks:
        check(found[name, layout])


@pytest.mark.parametrize("name", POLICIES)
def test_logprobs_are_refreshed_while_a_step_is_open(ranks, name):
    for found in ranks:
        check(found[name, "refreshed"])


def test_a_policy_without_a_split_step_is_refused():
    with pytest.raises(MisuseError, match=r"has no begin_train_step and no train_microbatches: import megapatch"):
        PolicyTrainer(SimpleNamespace(), None)


# ------------------------------------------------------------------------------------------ buffer and weights
@needs_replay_buffer
def test_the_replay_buffer_is_a_buffer():
    ((steps, parts),) = run_ranks(filled, 1, setup=find_weight_sync)
    assert steps == {"steps": [[["0", "1"]] * 2] * 2, "held": [], "slots": 0, "told": [0, 1, 2]}
    tag = {"group_id": "prompt", "weight_version": 3}
    assert parts == {
        "reserved": [{**tag, "committed": False, "expected_num_samples": 1}],
        "changes": [1],
        "woken": True,
        "tags": [{**tag, "committed": True, "expected_num_samples": 2}] * 2,
        "claimed": (True, {}),
        "twice": "claim(): prompt group 'prompt' is claimed already, or gone",
        "given back": True,
        "left": ["another"],
        "held": ([], {}, set(), 0),
        "closed": False,
        "lists of two lengths": "zip() argument 4 is longer than arguments 1-3",
    }


def synced(rank, world_size):
    """A sync by NeMo-RL's own synchronizer: what the pump has called, in order."""
    made, calls = synchronizer()
    manager = SimpleNamespace(set_weight_version=lambda version: calls.append(("rollouts", version)))
    caches = SimpleNamespace(invalidate_kv_cache=lambda: calls.append(("caches", None)))
    config = StreamingConfig(generations_per_prompt=1)
    pump = TrainPump(config, Recorder(), RolloutBuffer(), made, InFlightUpdates(manager, caches), version=5)
    asyncio.run(pump.sync_weights())
    return [call for call in calls if call[0] in ("update_weights_from_collective", "rollouts", "caches")]


@pytest.mark.skipif(not has_synchronizers, reason="this NeMo-RL has no synchronizers")
def test_nemo_rls_synchronizers_are_synchronizers():
    (calls,) = run_ranks(synced, 1, setup=find_weight_sync)
    assert [name for name, _ in calls] == ["update_weights_from_collective", "rollouts", "caches"]
    assert calls[1] == ("rollouts", 5)
