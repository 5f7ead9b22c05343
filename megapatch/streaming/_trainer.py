"""What the pump asks of a trainer, and its train_microbatch calls under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ._buffer import MaybeAwaitable


class Trainer(Protocol):
    """One optimizer step at a time, from any number of microbatch calls. Plain methods, which are called in one
    thread of their own, coroutine functions, or methods of a Ray actor, whose handle the pump is given then. They
    are called one after the other, and a call is waited for even where the pump is cancelled.

    A trainer that can refresh log-probs also has ``prepare_logprobs(data, refresh_policy_logprobs=,
    refresh_reference_logprobs=)``, which returns the data to train on; it may be called while a step is open.
    """

    def begin_train_step(self) -> MaybeAwaitable[object]: ...

    def train_microbatch(self, data: Any, /) -> MaybeAwaitable[object]:
        """Forward and backward of one prompt group, as the buffer gave it and the pump prepared it."""

    def finish_train_step(self) -> MaybeAwaitable[Mapping[str, Any] | object]:
        """Step the optimizer; metrics, as a mapping or a dataclass. Where it raises, the step is aborted: a
        trainer whose optimizer has stepped by then has trained on samples that come again."""

    def abort_train_step(self) -> MaybeAwaitable[object]:
        """Drop the gradients of the open step. Where none is open, after a begin that failed, say, do nothing."""
