"""The parts of a pump: the protocols that they follow, and checks of those that a pump is given."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from ..errors import MisuseError
from ._groups import Group, Samples

_T = TypeVar("_T")
MaybeAwaitable: TypeAlias = _T | Awaitable[_T]


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


class Buffer(Protocol):
    """Rollouts between generation and training, for one pump at a time.

    Methods may be plain (they run in the event loop, so they have to be quick), coroutine functions, or methods of
    a Ray actor's handle.

    While it waits for a group, the pump reads all tags whenever `changes` has grown, which takes the event loop
    about a millisecond for 1,000 samples.

    A call may fail after it took effect (a reply can be lost), and is then repeated. So `give_back` and `clear`
    have to accept groups that they have dealt with before, or that the buffer does not hold.
    """

    def samples(self) -> MaybeAwaitable[Samples]:
        """Return the tags of all samples that are not claimed, in order of arrival."""

    def claim(self, group: Group, /) -> MaybeAwaitable[Any]:
        """Return the data of a group, and leave the group out of `samples` from now on.

        Raises:
            MisuseError: the group is claimed already, or not in the buffer. The pump does not give it back then.
        """

    def give_back(self, groups: Sequence[Group], /) -> MaybeAwaitable[None]:
        """Undo the claims of these groups."""

    def clear(self, groups: Sequence[Group], /) -> MaybeAwaitable[None]:
        """Drop these groups: they were trained on, or are too old."""

    def changes(self) -> MaybeAwaitable[int]:
        """Return a number that grows whenever a sample is added to `samples` or a tag changes."""

    def wait_for_change(self, seen: int, /) -> Awaitable[bool]:
        """Wait for a change. The pump cancels this call when it stops waiting, so it must not block the loop.

        Args:
            seen: a value that `changes` has returned.

        Returns:
            True once `changes` is more than `seen`; False if nothing more will come.
        """


class Synchronizer(Protocol):
    """Pushes the trainer's weights to generation.

    The method may be plain (it runs in the trainer's thread), a coroutine function, or a method of a Ray actor's
    handle.
    """

    def sync_weights(self) -> MaybeAwaitable[object]:
        """Push the current weights. The version is not an argument: see `Generation`."""


class Generation(Protocol):
    """Inference engines that can be paused during a weight sync.

    Methods may be plain (they run in the event loop, so they have to be quick), coroutine functions, or methods
    of a Ray actor's handle. `megapatch.weight_sync.paused_generation` says what happens when one fails or is
    missing.

    The pump also calls ``set_weight_version(version)`` after each sync, if there is such a method (a plain one
    runs in the trainer's thread). Rollouts sampled from then on have to bear this version.
    """

    def pause_generation(self) -> MaybeAwaitable[object]:
        """Stop serving, or abort, requests in flight."""

    def resume_generation(self) -> MaybeAwaitable[object]:
        """Serve requests again."""


class PausedBySync:
    """Generation whose own weight sync pauses and resumes it, so that a pump has only to pass on the version.

    Attributes:
        version: of the weights that engines have.
    """

    version = 0

    def set_weight_version(self, version: int) -> None:
        """Note the version of the synced weights."""
        self.version = version

    async def pause_generation(self) -> None:
        """Do nothing: the sync pauses."""

    async def resume_generation(self) -> None:
        """Do nothing: the sync resumes."""


class Logger(Protocol):
    """Takes the pump's metrics.

    The method may be plain (it runs in the event loop, so it has to be quick), a coroutine function, or a method
    of a Ray actor's handle.
    """

    def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str) -> object:
        """Log the metrics of an optimizer step.

        Args:
            metrics: values by name, with prefix "timing/train" in seconds.
            step: the version, which counts optimizer steps.
            prefix: "train", "streaming" or "timing/train".
        """


# ---------------------------------------------------------------------------- checks
def methods_of(protocol: type) -> list[str]:
    """Return the names of a protocol's methods."""
    return [name for name in vars(protocol) if not name.startswith("_")]


def require(role: str, given: Any, *names: str) -> None:
    """Raise MisuseError unless this part has methods of these names."""
    if missing := [f"{name}()" for name in names if not hasattr(given, name)]:
        raise MisuseError(f"the {role}, a {type(given).__name__}, has no {', '.join(missing)}")


def whole_version(version: Any) -> int:
    """Return the version as a plain int, or raise MisuseError."""
    try:
        whole = int(operator.index(version))
    except TypeError:
        whole = -1
    if whole < 0:
        raise MisuseError(f"version is {version!r}; it has to be a whole number, 0 or more")
    return whole
