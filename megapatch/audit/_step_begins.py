"""gradients-kept, main-params-agree, kept-between-steps: a step begins with what was left for it.

Watches   finalize_model_grads(), and then the next step of the optimizer, or its prepare_grads(): torch counts the
          changes of a buffer in between. Changes through .data are not counted: in the steps that are looked at
          closely 128 elements of a buffer, or more, are compared.
          Optimizers with main parameters in fp32 are watched as they take the gradients of a step: patches have
          put everything right by then. This rank's part of each parameter is compared with its main parameter,
          rounded. That is in every MEGAPATCH_AUDIT_EVERY steps (50), and in the step after a load, a save, an
          exception, a forward-only call, or the making of a model. In other steps it copies a few elements of up
          to 16 parameters, and compares them at the next close look, or as findings are asked for.
          Of each optimizer some elements of its moments are compared, from the end of a step to the beginning of
          the next. So are weights of which there is one copy (in fp32). Loads show themselves to LoadedIsThere.
          All this in all releases.
Limits    changes of other elements of gradients through .data, or by an extension. FP8 parameters, main parameters
          on another device, and those that a precision-aware optimizer does not keep in fp32 are not compared.
          Between steps up to 16 parameters of each optimizer are looked at, 8 elements of each; FSDP's are not.
Cost      reads this rank's parameters and main parameters once in a step that is looked at closely, and the result
          at its end. In the others it copies some elements, and waits for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .._mcore.bucket_groups import chunks_of
from .._mcore.main_param_pairs import pairs
from .._mcore.main_params import has_memory
from .._mcore.side_table import SideTable
from ..patch import Site
from ._audit import Audit, Part, Step
from ._chunks import grad_buffers
from ._findings import describe, observes, user_code
from ._samples import Unread, differences, differs, evenly_of, sample_of, spread_over
from ._watching import RAISED, around, before, site

_MAINS, _WEIGHTS, _MOMENTS = "some parameters", "weights in fp32", "moments"
"""What samples are of."""


class _Left(NamedTuple):
    """Samples of tensors as a step has left them, by kind, and how many loads there had been."""

    samples: dict[str, dict[Any, Any]]
    loads: int


class StepBegins(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._finished = SideTable()
        """About a buffer, as its gradients were finished: its counts, and a sample, if it is looked at closely."""
        self._changed: list[Any] = []
        """Whether gradients have changed uncounted in the step that is under way, as tensors."""
        self._compared: list[tuple[list[Any], Any, tuple[str, ...]]] = []
        """In this step: parameters, whether each differs from its main parameter, and the user's code then."""
        self._left: weakref.WeakKeyDictionary[Any, _Left] = weakref.WeakKeyDictionary()
        """By optimizer, of those that others consist of."""
        self._unread = Unread()
        self._looks = False
        """Whether the step that is under way is looked at closely."""

    def sites(self) -> Iterator[Site]:
        package, finalize, take = "megatron.core", "finalize_model_grads", "_copy_model_grads_to_main_grads"
        yield site(
            f"{package}.distributed.{finalize}",
            {finalize: around(self._begin_finishing, self._note_finished)},
            expected={finalize: ("model", "num_tokens")},
        )
        prepare = {"MixedPrecisionOptimizer.prepare_grads": before(self._look_at_gradients)}
        plain = {f"Float16OptimizerWithFloat16Params.{take}": before(self._compare)}
        yield site(f"{package}.optimizer.optimizer", {**prepare, **plain})
        sharded = {f"DistributedOptimizer.{take}": before(self._compare)}
        yield site(f"{package}.optimizer.distrib_optimizer", sharded)

    # ------------------------------------------------------------------------ gradients
    @observes
    def _begin_finishing(self, model: Any, num_tokens: Any = None, *_: Any, **__: Any) -> None:
        for part in self.audit.parts:
            part.finishing(chunks_of(model) or [], num_tokens)

    @observes
    def _note_finished(self, _: None, result: Any, model: Any, *__: Any, **___: Any) -> None:
        if result is RAISED:
            return
        for buffer in grad_buffers(chunks_of(model) or []):
            sample = spread_over(buffer.grad_data) if self.audit.looks() and has_memory(buffer.grad_data) else None
            self._finished.set(buffer, (_counts(buffer), sample))

    @observes
    def _look_at_gradients(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self._compare_gradients(self.audit.models.stepped_by(optimizer))

    def _compare_gradients(self, chunks: list[Any]) -> None:
        """Note gradients that were changed since they were finished."""
        for buffer in grad_buffers(chunks):
            before = self._finished.pop(buffer, None)  # the step itself may change them
            if before is None:
                continue
            self.ledger.judged["gradients-kept"] += 1
            counts, sample = before
            if counts != _counts(buffer):
                self._report_gradients()
            elif sample is not None:
                self._changed.append(differs(sample, spread_over(buffer.grad_data)))

    def _report_gradients(self) -> None:
        what = "gradients were changed between finalize_model_grads() and the optimizer step"
        self.ledger.report("gradients-kept", "changed", what)

    def zeroed(self, buffer: Any) -> None:
        self._finished.pop(buffer, None)

    # ------------------------------------------------------------------------ weights and moments
    def begin_step(self, step: Step) -> None:
        """Compare what was left for the step with what is there, without waiting for it."""
        self._compare_gradients(step.chunks)
        self._looks = self.audit.looks()
        for optimizer in step.optimizers:
            if self._looks and (apart := _apart(optimizer)):
                named = (pair for chunk in step.chunks for pair in chunk.module.named_parameters())
                what = f"the optimizer steps other memory than that of {describe(apart, named)}"
                self.ledger.report("kept-between-steps", "memory", what)
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

    def end_step(self, step: Step) -> None:
        """Report differences, and look at what the step has left. Megatron has waited for the GPU by now."""
        compared, self._compared = self._compared, []
        changed, self._changed = self._changed, []
        if any(map(bool, changed)):
            self._report_gradients()
        for parameters, differ, where in compared:
            wrong = [parameter for parameter, differs in zip(parameters, differ.tolist(), strict=True) if differs]
            if wrong:
                named = (pair for chunk in step.chunks for pair in chunk.module.named_parameters())
                self._report_mains(f"{describe(wrong, named)} {'are' if wrong[1:] else 'is'}", where)
        if self._looks or compared:
            self.judge()
        for optimizer in step.optimizers:
            self._left[optimizer] = _Left(_samples(optimizer), self.audit.loads)

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

    def forget(self) -> None:
        self._compared.clear()
        self._unread.clear()


def _counts(buffer: Any) -> tuple[int, int]:
    """Return two numbers, one of which changes when a buffer is changed in place or gets other memory."""
    return buffer.grad_data._version, int(buffer.grad_data.untyped_storage().nbytes())


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


def _apart(optimizer: Any) -> list[Any]:
    """Return those of some parameters in fp32 of which this rank steps a shard that is not their memory."""
    models, shards = (evenly_of(getattr(optimizer, f"{of}_fp32_groups", None) or ()) for of in ("model", "shard"))
    places = (each.untyped_storage().data_ptr() for each in shards)
    return [each for each, place in zip(models, places, strict=True) if each.untyped_storage().data_ptr() != place]


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
