"""The settings of a `TrainPump`, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ..errors import ConfigError

Policy: TypeAlias = Literal["weight_fifo", "ready_first"]
POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(frozen=True, kw_only=True)
class StreamingConfig:
    """How rollouts are combined into steps.

    To change a field, make a new config: dataclasses.replace() would take computed defaults for settings.

    Args:
        generations_per_prompt: samples of a prompt group whose tags do not say how many it has.
        target_prompt_groups_per_step: prompt groups of a step, after which weights are synced. They are trained on
            one by one as they come.
        train_global_batch_size: samples of an optimizer step. By default all samples of the step, which then has
            one optimizer step.
        max_staleness: versions (optimizer steps) that a group may be behind; 0 is on-policy.
        pick: which group is trained on next.
            "weight_fifo": the oldest weights first. Each rollout in flight that would be too old after the
            optimizer step keeps a place in it: none that `TrainPump.rollout` has begun is lost.
            "ready_first": as they become ready. Rollouts that are too old when they end are evicted.
        prompt_groups_per_microbatch: prompt groups that a microbatch call trains on together, where a single one
            has fewer samples than data-parallel ranks times the micro batch size.
            The last call of an optimizer step also takes the remainder, so no call has fewer. Above 1 the trainer
            gets a list of the groups' data.
        refresh_policy_logprobs: passed to the trainer's ``prepare_logprobs()`` for each group, which is called if
            this or the next field is set.
        refresh_reference_logprobs: passed to it as well.

    Raises:
        ConfigError: a field breaks a rule (a ValueError that names field, value and rule).
    """

    generations_per_prompt: int
    target_prompt_groups_per_step: int = 1
    train_global_batch_size: int = None  # type: ignore[assignment]  # set below
    max_staleness: int = 0
    pick: Policy = "weight_fifo"
    prompt_groups_per_microbatch: int = 1
    refresh_policy_logprobs: bool = False
    refresh_reference_logprobs: bool = False

    def __post_init__(self) -> None:
        self._check_whole("generations_per_prompt", 1)
        self._check_whole("target_prompt_groups_per_step", 1)
        if self.train_global_batch_size is None:
            object.__setattr__(self, "train_global_batch_size", self._samples_per_step)
        self._check_whole("train_global_batch_size", 1)
        self._check_whole("max_staleness", 0)
        self._check_whole("prompt_groups_per_microbatch", 1)
        self._require("pick", self.pick in POLICIES, f"one of {', '.join(POLICIES)}")
        for field in ("refresh_policy_logprobs", "refresh_reference_logprobs"):
            self._require(field, isinstance(getattr(self, field), bool), "True or False")
        self._check_batches()

    @property
    def prompt_groups_per_optimizer_step(self) -> int:
        """Prompt groups of an optimizer step."""
        return self.train_global_batch_size // self.generations_per_prompt

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps from one weight sync to the next."""
        return self._samples_per_step // self.train_global_batch_size

    @property
    def prompt_groups_by_microbatch(self) -> list[int]:
        """Prompt groups of each microbatch call of an optimizer step."""
        calls, remainder = divmod(self.prompt_groups_per_optimizer_step, self.prompt_groups_per_microbatch)
        sizes = [self.prompt_groups_per_microbatch] * calls
        sizes[-1] += remainder
        return sizes

    @property
    def refreshes_logprobs(self) -> bool:
        """Whether the trainer's ``prepare_logprobs()`` is called."""
        return self.refresh_policy_logprobs or self.refresh_reference_logprobs

    @property
    def _samples_per_step(self) -> int:
        return self.target_prompt_groups_per_step * self.generations_per_prompt

    def _check_batches(self) -> None:
        size, samples, each = self.train_global_batch_size, self._samples_per_step, self.generations_per_prompt
        rule = f"a multiple of generations_per_prompt ({each}): whole prompt groups"
        self._require("train_global_batch_size", size % each == 0, rule)
        product = f"target_prompt_groups_per_step * generations_per_prompt ({samples})"
        rule = f"a divisor of {product}: whole optimizer steps"
        self._require("train_global_batch_size", samples % size == 0, rule)
        steps, groups = self.optimizer_steps_per_step, self.prompt_groups_per_optimizer_step
        # Upstream only warns. But nothing sampled in a step is newer than the weights that it began with.
        rule = (
            f"{steps - 1} or more: a step has {steps} optimizer steps and weights are synced only after the last, "
            "so no group would be new enough"
        )
        self._require("max_staleness", self.max_staleness >= steps - 1, rule)
        rule = f"{groups} or less, the prompt groups of an optimizer step"
        self._require("prompt_groups_per_microbatch", self.prompt_groups_per_microbatch <= groups, rule)

    def _require(self, field: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(field, getattr(self, field), rule)

    def _check_whole(self, field: str, least: int) -> None:
        value = getattr(self, field)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        self._require(field, is_whole and value >= least, f"a whole number, {least} or more")
