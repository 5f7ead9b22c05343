"""Make a microbatch call's data of the prompt groups that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import MisuseError
from ._calls import SequentialCalls, perform, wait_out
from ._config import StreamingConfig
from ._tags import Group
from ._timer import Timer
from ._trainer import Trainer


class Preparation:
    """Refreshes log-probs, which takes a call's groups together, and computes advantages, group by group.

    Advantages are computed once for a group: what a failed step has computed is kept for the next one.
    """

    def __init__(
        self,
        config: StreamingConfig,
        trainer: Trainer,
        compute_advantages: Callable[[Any], Any] | None,
        calls: SequentialCalls,
        timer: Timer,
    ) -> None:
        self._config, self._trainer, self._compute_advantages = config, trainer, compute_advantages
        self._calls, self._timer = calls, timer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megapatch-advantages")
        self.computed: dict[Group, Any] = {}  # of groups that were not trained on yet

    async def prepare(self, groups: Sequence[Group], claimed: Sequence[Any]) -> Any:
        """Return what train_microbatch() gets: a group's data, or a list of them if a call takes several."""
        # By a step that failed: once is enough, it may change data in place.
        is_computed = [group in self.computed for group in groups]
        data = [self.computed.get(group, its) for group, its in zip(groups, claimed, strict=True)]
        if self._config.refreshes_logprobs:
            data = await self._with_logprobs(data)
        if self._compute_advantages is not None:
            with self._timer.phase("compute_advantages"):
                for place, group in enumerate(groups):
                    if not is_computed[place]:
                        computing = self._computed_advantages(self._compute_advantages, group, data[place])
                        data[place] = await wait_out(computing)
        return self._together(data)

    def trained(self, groups: Sequence[Group], oldest: int) -> None:
        """Forget groups that were trained on, and those from weights before the version `oldest`."""
        self.computed = {
            group: data
            for group, data in self.computed.items()
            if group not in groups and (group.weight_version or 0) >= oldest
        }

    def _together(self, data: list[Any]) -> Any:
        return data[0] if self._config.prompt_groups_per_microbatch == 1 else data

    async def _with_logprobs(self, data: list[Any]) -> list[Any]:
        call = self._calls(
            self._trainer,
            "prepare_logprobs",
            self._together(data),
            refresh_policy_logprobs=self._config.refresh_policy_logprobs,
            refresh_reference_logprobs=self._config.refresh_reference_logprobs,
        )
        refreshed = await wait_out(call)
        if self._config.prompt_groups_per_microbatch == 1:
            return [refreshed]
        if not isinstance(refreshed, Sequence) or len(refreshed) != len(data):
            found = f"{len(refreshed)} items" if isinstance(refreshed, Sequence) else type(refreshed).__name__
            raise MisuseError(
                f"prepare_logprobs() returned {found} for {len(data)} prompt groups; expected a list with the "
                "data of each, as prompt_groups_per_microbatch is above 1"
            )
        return list(refreshed)

    async def _computed_advantages(self, compute: Callable[[Any], Any], group: Group, data: Any) -> Any:
        """Compute and keep them here, where a cancellation of the step does not lose them."""
        self.computed[group] = computed = await perform(
            compute, data, thread=self._thread, watchdog=self._calls.watchdog
        )
        return computed
