"""kept-between-steps: what an optimizer steps stays as it is until its next step, but for loads.

Watches   the optimizer step: some elements of its moments, and of the weights of which there is one copy (those in
          fp32; the others have main parameters, which main-params-agree compares), as a step has ended, and as the
          next one begins. Loads show themselves to LoadedIsThere.
Limits    up to 16 parameters of each optimizer are looked at, 8 elements of each. FSDP's are not.
Cost      copies some elements in each step, twice; no sync: the result is read as a step ends that is looked at
          closely, or as findings are asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from ._audit import Audit, Part, Step
from ._findings import observes
from ._samples import Unread, differences, evenly_of, sample_of


class _Left(NamedTuple):
    """Samples of tensors as a step has left them, by kind, and how many loads there had been."""

    samples: dict[str, dict[Any, Any]]
    loads: int


class KeptBetweenSteps(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._left: weakref.WeakKeyDictionary[Any, _Left] = weakref.WeakKeyDictionary()
        """By optimizer, of those that others consist of."""
        self._changed = Unread()
        self._looks = False
        """Whether the step that is under way is looked at closely."""

    @observes
    def begin_step(self, step: Step) -> None:
        """Compare what the last step has left with what is there, without waiting for it."""
        self._looks = self.audit.looks()
        for optimizer in step.optimizers:
            left = self._left.pop(optimizer, None)
            if left is not None and left.loads == self.audit.loads:
                for what, now in _samples(optimizer).items():
                    for differ in differences(left.samples[what], now):
                        self.ledger.judged["kept-between-steps"] += 1
                        self._changed.add(what, differ, self.ledger.step + 1)

    def has_changed(self, optimizer: Any) -> bool:
        """Return whether weights in fp32 were changed since the last step, and not loaded. Waits for a GPU."""
        left = self._left.get(optimizer)
        if left is None or left.loads != self.audit.loads:
            return False
        return any(map(bool, differences(left.samples[_WEIGHTS], sample_of(_weights(optimizer)))))

    @observes
    def end_step(self, step: Step) -> None:
        """Report changes, and look at what the step has left; Megatron's step has waited for the GPU by now."""
        if self._looks:
            self.judge()
        for optimizer in step.optimizers:
            self._left[optimizer] = _Left(_samples(optimizer), self.audit.loads)

    @observes
    def judge(self) -> None:
        """Report changes in the steps until now."""
        for what, step in self._changed.read():
            text = f"{what} are not what the optimizer's last step has left, and no load was seen"
            self.ledger.report("kept-between-steps", what.partition(" ")[0], text, step=step)

    @observes
    def forget(self) -> None:
        self._changed.clear()


_WEIGHTS = "weights in fp32"
_MOMENTS = "moments"


def _samples(optimizer: Any) -> dict[str, dict[Any, Any]]:
    return {_WEIGHTS: sample_of(_weights(optimizer)), _MOMENTS: sample_of(_moments(optimizer))}


def _weights(optimizer: Any) -> list[Any]:
    """Return some of this rank's weights in fp32, which have no main parameters."""
    for name in ("shard_fp32_groups", "fp32_from_fp32_groups"):
        if hasattr(optimizer, name):
            return evenly_of(getattr(optimizer, name))
    return _stepped(optimizer)


def _moments(optimizer: Any) -> Iterator[Any]:
    stepped = _stepped(optimizer)
    state = getattr(optimizer.optimizer, "state", {}) if stepped else {}
    for parameter in stepped:
        of_parameter = state.get(parameter, {})
        yield from (of_parameter[name] for name in sorted(of_parameter) if name != "step")


def _stepped(optimizer: Any) -> list[Any]:
    """Return some of what torch's optimizer steps; nothing for a stub."""
    groups = getattr(getattr(optimizer, "optimizer", None), "param_groups", ())
    return evenly_of([group["params"] for group in groups])
