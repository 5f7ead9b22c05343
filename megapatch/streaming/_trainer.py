"""What the pump asks of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ._buffer import MaybeAwaitable


class Trainer(Protocol):
    """Takes one optimizer step at a time, from any number of microbatch calls.

    Methods may be plain (they all run in one thread of their own), coroutine functions, or methods of a Ray
    actor's handle. The pump calls them one after the other, and waits for a call to end even if it is cancelled.

    A trainer that can refresh log-probs also has ``prepare_logprobs(data, refresh_policy_logprobs=,
    refresh_reference_logprobs=)``, which returns the data to train on; it may be called while a step is open. It
    gets and returns a list with the data of each group where a microbatch call takes several.
    """

    def begin_train_step(self) -> MaybeAwaitable[object]:
        """Begin an optimizer step."""

    def train_microbatch(self, data: Any, /) -> MaybeAwaitable[object]:
        """Run forward and backward of one prompt group, or of several.

        Args:
            data: the group's data as `Buffer.claim` returned it, or as ``prepare_logprobs()`` and
                ``compute_advantages()`` made it. A list of such data, one for each group, if
                `StreamingConfig.prompt_groups_per_microbatch` is above 1.
        """

    def finish_train_step(self) -> MaybeAwaitable[Mapping[str, Any] | object]:
        """Step the optimizer.

        If this raises, the pump aborts the step and trains on its groups again. So do not raise after the
        optimizer has stepped.

        Returns:
            Metrics as a mapping or a dataclass; the pump ignores anything else.
        """

    def abort_train_step(self) -> MaybeAwaitable[object]:
        """Drop the gradients of the open step. Do nothing if none is open, for example after a failed begin."""
