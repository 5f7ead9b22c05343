"""The settings of a `TrainPump`, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ..errors import ConfigError

Policy: TypeAlias = Literal["weight_fifo", "ready_first", "windowed"]
POLICIES: tuple[str, ...] = get_args(Policy)
SWITCHES = ("abort_stale_rollouts", "drop_equal_rewards", "refresh_policy_logprobs", "refresh_reference_logprobs")


@dataclass(frozen=True, kw_only=True)
class StreamingConfig:
    """How rollouts are combined into steps.

    To change a field, make a new config: dataclasses.replace() would take computed defaults for settings.

    Args:
        generations_per_prompt: samples of a prompt group whose tags do not say how many it has.
        min_prompt_groups_per_batch: eligible prompt groups needed before a step begins; from then on they are
            trained on one by one as they come.
        target_prompt_groups_per_step: prompt groups of a step, after which weights are synced. The default is
            min_prompt_groups_per_batch: a step begins when all of its groups are there.
        train_global_batch_size: samples of an optimizer step. By default all samples of the step, which then has
            one optimizer step.
        max_staleness: versions (optimizer steps) that a group may be behind; 0 is on-policy.
        pick: which group is trained on next, and how many rollouts begin ahead of training; docs/streaming.md says
            how each policy biases the training data.
            "weight_fifo": the oldest weights first. A place is kept for each rollout in flight that would be too
            old after the optimizer step, so no rollout that `TrainPump.rollout` has begun is lost.
            "ready_first": as they become ready. Rollouts that are too old when they end are evicted.
            "windowed": the newest weights first, and no bound on rollouts ahead; many of them are evicted.
        prompt_groups_per_microbatch: prompt groups that a microbatch call trains on together, for trainers that
            cannot run on a single one (its samples are fewer than data-parallel ranks times the micro batch size).
            The last call of an optimizer step also takes the remainder, so no call has fewer. Above 1 the trainer
            gets a list of the groups' data.
        oversampled_prompt_groups: rollouts that may begin beyond those that can be trained on. Training takes the
            first to end and the last are dropped, so this favors short rollouts. Only with "weight_fifo" and
            "ready_first".
        max_rollouts_in_flight: prompt groups whose `TrainPump.rollout` may run at a time; None: as many as can be
            trained on.
        max_microbatches_in_flight: microbatch calls that the trainer works on or that wait for it; with 2 the next
            one is prepared during training on the current one.
        abort_stale_rollouts: cancel the body of a `TrainPump.rollout` that began with weights that are too old by
            now, as its group would be evicted. Its context ends without an exception, and its samples are dropped.
        drop_equal_rewards: drop prompt groups whose samples all have the same reward, which have no advantage to
            learn from; another rollout begins in the place of each. Tags need the field ``reward``.
        refresh_policy_logprobs: passed to the trainer's ``prepare_logprobs()`` for each group, which is called if
            this or the next field is set.
        refresh_reference_logprobs: passed to it as well.
        orphan_timeout: seconds without a new sample after which a prompt group that is not complete is dropped,
            unless its `TrainPump.rollout` is running: its worker may have died. None: never.
        rollout_timeout: seconds that the pump waits for one more eligible prompt group; None: as long as the
            buffer is open.

    Raises:
        ConfigError: a field breaks a rule (a ValueError that names field, value and rule).
    """

    generations_per_prompt: int
    min_prompt_groups_per_batch: int = 1
    target_prompt_groups_per_step: int = None  # type: ignore[assignment]  # set below
    train_global_batch_size: int = None  # type: ignore[assignment]
    max_staleness: int = 0
    pick: Policy = "weight_fifo"
    prompt_groups_per_microbatch: int = 1
    oversampled_prompt_groups: int = 0
    max_rollouts_in_flight: int | None = None
    max_microbatches_in_flight: int = 2
    abort_stale_rollouts: bool = False
    drop_equal_rewards: bool = False
    refresh_policy_logprobs: bool = False
    refresh_reference_logprobs: bool = False
    orphan_timeout: float | None = 3600.0
    rollout_timeout: float | None = None

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()
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

    def _check_sizes(self) -> None:
        """Check each number by itself, and fill in the two that follow from others."""
        self._check_whole("generations_per_prompt", 1)
        self._check_whole("min_prompt_groups_per_batch", 1)
        self._default("target_prompt_groups_per_step", self.min_prompt_groups_per_batch)
        self._check_whole(
            "target_prompt_groups_per_step", self.min_prompt_groups_per_batch, "min_prompt_groups_per_batch"
        )
        self._default("train_global_batch_size", self._samples_per_step)
        self._check_whole("train_global_batch_size", 1)
        self._check_whole("max_staleness", 0)
        self._check_whole("prompt_groups_per_microbatch", 1)
        self._check_whole("oversampled_prompt_groups", 0)
        if self.max_rollouts_in_flight is not None:
            self._check_whole("max_rollouts_in_flight", 1)
        self._check_whole("max_microbatches_in_flight", 1)

    def _check_choices(self) -> None:
        self._require("pick", self.pick in POLICIES, f"one of {', '.join(POLICIES)}")
        is_bounded = self.pick != "windowed" or not self.oversampled_prompt_groups
        self._require("oversampled_prompt_groups", is_bounded, "0: windowed does not bound rollouts")
        for field in SWITCHES:
            self._require(field, isinstance(getattr(self, field), bool), "True or False")
        may_differ = not self.drop_equal_rewards or self.generations_per_prompt > 1
        self._require("drop_equal_rewards", may_differ, "False where generations_per_prompt is 1: all are equal")
        for field in ("orphan_timeout", "rollout_timeout"):
            timeout = getattr(self, field)
            is_time = timeout is None or (_is_number(timeout, (int, float)) and timeout > 0)
            self._require(field, is_time, "a number of seconds above 0, or None")

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

    def _default(self, field: str, value: int) -> None:
        if getattr(self, field) is None:
            object.__setattr__(self, field, value)

    def _check_whole(self, field: str, least: int, of: str = "") -> None:
        value = getattr(self, field)
        rule = f"a whole number, {f'{of} ({least})' if of else least} or more"
        self._require(field, _is_number(value, int) and value >= least, rule)


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
