"""A configuration that cannot work is refused: which field, what it is, what it has to be."""

from __future__ import annotations

import dataclasses

import pytest

from megapatch import MegapatchError
from megapatch.streaming import ConfigError, StreamingConfig


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
