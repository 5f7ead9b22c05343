"""main-params-agree: in half precision, an optimizer step begins from the parameters that the model has.

Watches   the optimizers with main parameters in fp32, as they take the gradients of a step, thus after all that
          patches put right as a step begins: every MEGAPATCH_AUDIT_EVERY steps (50), and in the step after a load,
          a save, an exception, a forward-only call, and the making of a model. This rank's part of each parameter
          is compared with its main parameter, rounded. In the other steps some elements of up to 16 parameters
          are; that is read in the next step that is looked at closely, or as findings are asked for. In all
          releases.
Limits    parameters in fp32, of which there is one copy. FP8 parameters, main parameters on another device, and
          those that a precision-aware optimizer does not keep in fp32 are not compared.
Cost      reads this rank's parameters and main parameters once in a step that is looked at closely, and the result
          at its end. In the others it copies some elements, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .._mcore.main_params import has_memory, pairs
from ..patch import Site
from ._audit import Audit, Part, Step
from ._findings import describe, observes, user_code
from ._samples import Unread, differs, evenly_of, sample_of
from ._watching import before, site

_TAKE = "_copy_model_grads_to_main_grads"


class MainParamsAgree(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._compared: list[tuple[list[Any], Any, tuple[str, ...]]] = []
        """In this step: parameters, whether each differs from its main parameter, and the user's code then."""
        self._unread = Unread()

    def sites(self) -> tuple[Site, ...]:
        package = "megatron.core.optimizer"
        return (
            site(f"{package}.optimizer", {f"Float16OptimizerWithFloat16Params.{_TAKE}": before(self._compare)}),
            site(f"{package}.distrib_optimizer", {f"DistributedOptimizer.{_TAKE}": before(self._compare)}),
        )

    @observes
    def _compare(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if not self.audit.looks():
            for differ in _samples_differ(optimizer):
                self.ledger.judged["main-params-agree"] += 1
                self._unread.add("some parameters", differ, self.ledger.step + 1)
            return
        parameters, differ = compared_with_mains(optimizer)
        if parameters:
            self.ledger.judged["main-params-agree"] += 1
            self._compared.append((parameters, differ, user_code()))

    @observes
    def end_step(self, step: Step) -> None:
        """Report differences; Megatron's step has waited for the GPU by now."""
        compared, self._compared = self._compared, []
        for parameters, differ, where in compared:
            wrong = [parameter for parameter, differs in zip(parameters, differ.tolist(), strict=True) if differs]
            if wrong:
                named = (pair for chunk in step.chunks for pair in chunk.module.named_parameters())
                self._report(f"{describe(wrong, named)} {'are' if wrong[1:] else 'is'}", where)
        if compared:
            self.judge()

    @observes
    def judge(self) -> None:
        """Report differences in the steps that were not looked at closely."""
        for what, step in self._unread.read():
            self._report(f"{what} are", step=step)

    def _report(self, what: str, where: tuple[str, ...] | None = None, step: int | None = None) -> None:
        text = f"{what} not what the optimizer's main parameters say, which overwrite the model's"
        self.ledger.report("main-params-agree", "step", text, where, step)

    @observes
    def forget(self) -> None:
        self._compared.clear()
        self._unread.clear()


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
