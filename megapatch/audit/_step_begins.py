"""main-params-agree, kept-between-steps: as a step begins, main parameters are the model's; nothing has changed.

Watches   the optimizers with main parameters in fp32, as they take the gradients of a step, thus after all that
          patches put right as a step begins: every MEGAPATCH_AUDIT_EVERY steps (50), and in the step after a load,
          a save, an exception, a forward-only call, and the making of a model. This rank's part of each parameter
          is compared with its main parameter, rounded. In other steps it copies a few elements of up to 16
          parameters, and compares them at the next close look, or as findings are asked for. In all releases. And
          of each optimizer some elements of its moments, and of the weights of which there is one copy (in fp32),
          as a step has ended, and as the next one begins. Loads show themselves to LoadedIsThere.
Limits    FP8 parameters, main parameters on another device, and those that a precision-aware optimizer does not
          keep in fp32 are not compared. Between steps up to 16 parameters of each optimizer are looked at, 8
          elements of each; FSDP's are not.
Cost      reads this rank's parameters and main parameters once in a step that is looked at closely, and the result
          at its end. In the others it copies some elements, and waits for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._mcore.main_params import has_memory, pairs
from ..patch import Site
from ._audit import Audit, Part, Step
from ._findings import describe, observes, user_code
from ._samples import Unread, differences, differs, evenly_of, sample_of
from ._watching import before, site

_TAKE = "_copy_model_grads_to_main_grads"
_MAINS, _WEIGHTS, _MOMENTS = "some parameters", "weights in fp32", "moments"
"""What samples are of."""


class _Left(NamedTuple):
    """Samples of tensors as a step has left them, by kind, and how many loads there had been."""

    samples: dict[str, dict[Any, Any]]
    loads: int


class StepBegins(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._compared: list[tuple[list[Any], Any, tuple[str, ...]]] = []
        """In this step: parameters, whether each differs from its main parameter, and the user's code then."""
        self._left: weakref.WeakKeyDictionary[Any, _Left] = weakref.WeakKeyDictionary()
        """By optimizer, of those that others consist of."""
        self._unread = Unread()
        self._looks = False
        """Whether the step that is under way is looked at closely."""

    def sites(self) -> tuple[Site, ...]:
        package = "megatron.core.optimizer"
        return (
            site(f"{package}.optimizer", {f"Float16OptimizerWithFloat16Params.{_TAKE}": before(self._compare)}),
            site(f"{package}.distrib_optimizer", {f"DistributedOptimizer.{_TAKE}": before(self._compare)}),
        )

    @observes
    def begin_step(self, step: Step) -> None:
        """Compare what the last step has left with what is there, without waiting for it."""
        self._looks = self.audit.looks()
        for optimizer in step.optimizers:
            left = self._left.pop(optimizer, None)
            if left is not None and left.loads == self.audit.loads:
                for what, now in _samples(optimizer).items():
                    for differ in differences(left.samples[what], now):
                        self.ledger.judged[f"kept-between-steps {what.split()[0]}"] += 1
                        self._unread.add(what, differ, self.ledger.step + 1)

    @observes
    def _compare(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if not self.audit.looks():
            for differ in _samples_differ(optimizer):
                self.ledger.judged["main-params-agree"] += 1
                self._unread.add(_MAINS, differ, self.ledger.step + 1)
            return
        parameters, differ = compared_with_mains(optimizer)
        if parameters:
            self.ledger.judged["main-params-agree"] += 1
            self._compared.append((parameters, differ, user_code()))

    def has_changed(self, optimizer: Any) -> bool:
        """Return whether weights in fp32 were changed since the last step, and not loaded. Waits for a GPU."""
        left = self._left.get(optimizer)
        if left is None or left.loads != self.audit.loads:
            return False
        return any(map(bool, differences(left.samples[_WEIGHTS], sample_of(_weights(optimizer)))))

    @observes
    def end_step(self, step: Step) -> None:
        """Report differences, and look at what the step has left. Megatron has waited for the GPU by now."""
        compared, self._compared = self._compared, []
        for parameters, differ, where in compared:
            wrong = [parameter for parameter, differs in zip(parameters, differ.tolist(), strict=True) if differs]
            if wrong:
                named = (pair for chunk in step.chunks for pair in chunk.module.named_parameters())
                self._report_mains(f"{describe(wrong, named)} {'are' if wrong[1:] else 'is'}", where)
        if self._looks or compared:
            self.judge()
        for optimizer in step.optimizers:
            self._left[optimizer] = _Left(_samples(optimizer), self.audit.loads)

    @observes
    def judge(self) -> None:
        """Report differences of samples in the steps until now."""
        for what, step in self._unread.read():
            if what == _MAINS:
                self._report_mains(f"{what} are", step=step)
            else:
                text = f"{what} are not what the optimizer's last step has left, and no load was seen"
                self.ledger.report("kept-between-steps", what.partition(" ")[0], text, step=step)

    def _report_mains(self, what: str, where: tuple[str, ...] | None = None, step: int | None = None) -> None:
        text = f"{what} not what the optimizer's main parameters say, which overwrite the model's"
        self.ledger.report("main-params-agree", "step", text, where, step)

    @observes
    def forget(self) -> None:
        self._compared.clear()
        self._unread.clear()


# ------------------------------------------------------------------------ main parameters
def compared_with_mains(optimizer: Any) -> tuple[list[Any], Any]:
    """Return the parameters that have a main parameter, and a tensor: whether this rank's part of each differs."""
    import torch

    comparable = _comparable(pairs(optimizer))
    bits = torch.int16
    differ = [(part.view(bits) != main.detach().to(part.dtype).view(bits)).any() for _, part, main in comparable]
    return [parameter for parameter, _, _ in comparable], torch.stack(differ) if differ else None


def _samples_differ(optimizer: Any) -> Iterator[Any]:
    """Yield tensors: whether some elements of some parameters differ from main parameters. Waits for nothing."""
    import torch

    comparable = _comparable(pairs(optimizer, evenly_of))
    mains = sample_of(main for _, _, main in comparable)
    for (device, dtype), part in sample_of(part for _, part, _ in comparable).items():
        main = mains.get((device, torch.float32))
        if main is not None and main.shape == part.shape:  # else one of them is not a plain tensor
            yield differs(part, main.to(dtype))


def _comparable(found: Iterable[tuple[Any, Any, Any]]) -> list[tuple[Any, Any, Any]]:
    return [
        (parameter, part, main)
        for parameter, part, main in found
        if main is not None and main.device == part.device and has_memory(main) and has_memory(part)
    ]


# ------------------------------------------------------------------------ what a step leaves
def _samples(optimizer: Any) -> dict[str, dict[Any, Any]]:
    return {_WEIGHTS: sample_of(_weights(optimizer)), _MOMENTS: sample_of(_moments(optimizer))}


def _weights(optimizer: Any) -> list[Any]:
    """Return some of this rank's weights in fp32, which have no main parameters."""
    for name in ("shard_fp32_groups", "fp32_from_fp32_groups"):
        if hasattr(optimizer, name):
            return evenly_of(getattr(optimizer, name))
    return stepped_by(optimizer)


def _moments(optimizer: Any) -> Iterator[Any]:
    stepped = stepped_by(optimizer)
    state = getattr(optimizer.optimizer, "state", {}) if stepped else {}
    for parameter in stepped:
        of_parameter = state.get(parameter, {})
        yield from (of_parameter[name] for name in sorted(of_parameter) if name != "step")


def stepped_by(optimizer: Any) -> list[Any]:
    """Return some of what torch's optimizer steps; nothing for a stub."""
    groups = getattr(getattr(optimizer, "optimizer", None), "param_groups", ())
    return evenly_of([group["params"] for group in groups])
