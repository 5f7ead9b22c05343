"""Configurations, arguments and calls that a pump refuses, two pumps on one buffer, and errors that travel."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import re

import pytest
from rigs.streaming.world import World, raised

from megapatch import MegapatchError
from megapatch.streaming import ConfigError, EmptyStepError, StreamingConfig, TrainPump


# ------------------------------------------------------------------------------------------ version=
@pytest.mark.parametrize("version", ["5", None, 5.5, -3])
def test_what_is_no_version_is_refused(version):
    told = f"version is {version!r}; it has to be a whole number, 0 or more"
    with pytest.raises(MegapatchError, match=f"^{re.escape(told)}$"):
        World().pump(version=version)


class Array:
    """Whole, and changed in place by +=, as an array without dimensions is."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value

    def __iadd__(self, other):
        self.value += other
        return self


async def test_a_version_from_a_checkpoint_becomes_a_plain_int():
    world, given = World(), Array(5)
    await world.put_each("ab", version=5)
    pump = world.pump(version=given, max_staleness=1)
    assert type(pump.version) is int
    await pump.step()
    assert (pump.version, given.value) == (6, 5)
    assert world.called("finish", "sync") == ["finish", "sync 1"]


# ------------------------------------------------------------------------------------------ two pumps
async def test_the_group_of_another_pump_is_left_to_it():
    first = World({"before microbatch": lambda: asyncio.sleep(10)})
    second = World({"before claim": lambda: asyncio.sleep(5)})  # both have seen it by then
    second.buffer = first.buffer
    await first.put("a")
    step = asyncio.ensure_future(first.pump().step())
    error = await raised(second.pump().step())
    assert isinstance(error, MegapatchError)
    assert str(error) == "claim(): prompt group 'a' is claimed already, or gone"
    assert second.called() == ["claim a"] and not first.buffer.samples()
    await step
    assert first.trained == [["a"]] and not len(first.buffer)


# ------------------------------------------------------------------------------------------ errors travel
def an_empty_step():
    return EmptyStepError(trained=1, target=4, evicted=3, waiting="Waiting: the end")


def a_wrong_field():
    try:
        StreamingConfig(generations_per_prompt=0)
    except ConfigError as error:
        return error


@pytest.mark.parametrize("make", [an_empty_step, a_wrong_field])
def test_errors_survive_pickle(make):
    """As of a pump in a Ray actor."""
    error = make()
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


# ------------------------------------------------------------------------------------------ parts and moments
async def test_one_thing_at_a_time():
    world = World()
    pump = world.pump(target_prompt_groups_per_step=2)
    await world.put("a")
    task = asyncio.ensure_future(pump.step())
    await asyncio.sleep(1)
    with pytest.raises(MegapatchError, match=r"sync_weights\(\) while step\(\).*: a train step is open"):
        await pump.sync_weights()
    with pytest.raises(MegapatchError, match=r"step\(\) while step\(\)"):
        await pump.step()
    assert pump.admitted
    assert not world.called("pause", "abort")
    await world.put("b")
    await task
    await pump.sync_weights()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            0,
            "the trainer, a Bare, has no begin_train_step(), train_microbatch(), finish_train_step(), "
            "abort_train_step()",
        ),
        (1, "the buffer, a Bare, has no samples(), claim(), give_back(), clear(), changes(), wait_for_change()"),
        (2, "the synchronizer, a Bare, has no sync_weights()"),
    ],
)
def test_what_has_not_the_methods_is_told_at_once(place, told):
    class Bare:
        pass

    world = World()
    parts = [Bare() if number == place else world for number in range(4)]
    with pytest.raises(MegapatchError, match=f"^{re.escape(told)}$"):
        TrainPump(StreamingConfig(generations_per_prompt=1), *parts)


def test_a_trainer_that_cannot_refresh_log_probs():
    class Trainer(World):
        prepare_logprobs = property()

    config, world = StreamingConfig(generations_per_prompt=1, refresh_policy_logprobs=True), World()
    with pytest.raises(MegapatchError, match=r"^the trainer, a Trainer, has no prepare_logprobs\(\)$"):
        TrainPump(config, Trainer(), world, world, world)


# ------------------------------------------------------------------------ a configuration that cannot work
def test_defaults():
    config = StreamingConfig(generations_per_prompt=4, target_prompt_groups_per_step=3)
    assert config.train_global_batch_size == 12
    assert (config.optimizer_steps_per_step, config.prompt_groups_per_optimizer_step) == (1, 3)
    assert config.max_staleness == 0


def test_several_optimizer_steps():
    config = StreamingConfig(
        generations_per_prompt=4, target_prompt_groups_per_step=6, train_global_batch_size=8, max_staleness=2
    )
    assert (config.optimizer_steps_per_step, config.prompt_groups_per_optimizer_step) == (3, 2)


def test_it_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StreamingConfig(generations_per_prompt=1).max_staleness = 1


WHOLE = "a whole number, {} or more"
BAD = [
    ("generations_per_prompt", 0, WHOLE.format(1), {}),
    ("generations_per_prompt", "4", WHOLE.format(1), {}),
    ("generations_per_prompt", None, WHOLE.format(1), {}),
    ("target_prompt_groups_per_step", 2.0, WHOLE.format(1), {}),
    ("target_prompt_groups_per_step", True, WHOLE.format(1), {}),
    ("train_global_batch_size", 0, WHOLE.format(1), {}),
    ("train_global_batch_size", 6, "a multiple of generations_per_prompt (4)", {}),
    ("train_global_batch_size", 8, "a divisor of target_prompt_groups_per_step * generations_per_prompt (12)", {}),
    ("train_global_batch_size", 24, "a divisor of target_prompt_groups_per_step * generations", {}),
    ("max_staleness", -1, WHOLE.format(0), {}),
    ("max_staleness", 1.5, WHOLE.format(0), {}),
    ("max_staleness", 1, "2 or more: a step has 3 optimizer steps", {"train_global_batch_size": 4}),
    ("pick", "freshest", "one of weight_fifo, ready_first", {}),
    ("prompt_groups_per_microbatch", 0, WHOLE.format(1), {}),
    ("prompt_groups_per_microbatch", 4, "3 or less, the prompt groups of an optimizer step", {}),
    ("prompt_groups_per_microbatch", 2, "1 or less", {"train_global_batch_size": 4, "max_staleness": 2}),
    ("refresh_policy_logprobs", "yes", "True or False", {}),
    ("refresh_reference_logprobs", 1, "True or False", {}),
]


@pytest.mark.parametrize(("field", "value", "rule", "others"), BAD)
def test_what_cannot_work_is_refused(field, value, rule, others):
    good = {"generations_per_prompt": 4, "target_prompt_groups_per_step": 3}
    with pytest.raises(ConfigError) as caught:
        StreamingConfig(**{**good, **others, field: value})
    error = caught.value
    assert isinstance(error, MegapatchError) and isinstance(error, ValueError)
    assert (error.field, repr(error.value)) == (field, repr(value))
    assert error.rule.startswith(rule)
    assert str(error) == f"{field} is {value!r}; it has to be {error.rule}"


def test_every_field_is_checked():
    assert {field for field, *_ in BAD} == {field.name for field in dataclasses.fields(StreamingConfig)}
