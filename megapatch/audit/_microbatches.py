"""tokens-counted, fresh-counts, calls-alike, data-differs: the tokens and losses of microbatches.

Watches   forward_step() of the schedules, in all releases, which shows each microbatch's tokens and loss.
          finalize_model_grads() shows their divisor: with calculate_per_token_loss, often by the tokens of a
          step's last call only. And, as calls begin, the factor of the gradient buffers, which are made for one
          way of dividing.
          In steps that are looked at closely, calls that train begin with a look at the routers' counts. Those for
          the expert bias are there from 0.12 on, those of the global auxiliary loss from 0.15 on.
          finalize_model_grads() zeroes them.
          When the parameters of ranks are compared, the number of their microbatches since the last time, and
          the losses of these. So are the tokens that they have divided by, their learning rates and weight decay.
Limits    a division that a trainer makes itself is not seen. A loss that is NaN counts where a successful step
          has made weights NaN: gradients may be cleaned by hand. A call is a step's first if no gradient has
          arrived since they were zeroed. Routers of models that were wrapped before any audit began are not
          judged, nor those of a model's first step. If only two of many ranks read the same data, it is
          not seen; nor where all losses are alike, but perhaps for their signs.
Cost      three small operations a microbatch. The losses of up to 256 are kept until ranks are compared, where it
          waits for a GPU. A small operation a router as a call that is looked at closely begins; the result is
          read as the step ends.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from .._mcore.side_table import SideTable
from .._mcore.step_state import counts_in
from ..patch import Site
from ._audit import Audit, Call, Part, Step
from ._chunks import ever_arrived, first_buffer, states_of
from ._findings import observes, user_code
from ._hashes import hash_of
from ._samples import sample_of
from ._step_begins import stepped_by
from ._watching import after, site

_WRONG_DIVISORS = MappingProxyType(
    {
        "normalizer": "gradients of several calls were divided by the number of tokens of the last one",
        "without": "a loss that is not zero has no tokens, by whose number calculate_per_token_loss divides",
    }
)
"""By kind of note, what it says."""
_MOST = 256
"""Losses that are kept, the last: where ranks are never compared nobody takes them."""


class _Counted:
    """Microbatches since gradients were zeroed: their tokens, how many losses are NaN or infinite, and the last
    loss; unread."""

    def __init__(self) -> None:
        self.tokens: Any = 0
        self.not_finite: Any = 0
        self.loss: Any = None


class _Trained:
    """Microbatches since the last comparison: how many, and on the last stage their losses.

    The divisor is the tokens that finalize_model_grads() was last given; it adds them up over ranks in place.
    """

    def __init__(self) -> None:
        self.count = 0
        self.losses: deque[Any] = deque(maxlen=_MOST)
        self.divisor: Any = 0


class Microbatches(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._counted: weakref.WeakKeyDictionary[Any, _Counted] = weakref.WeakKeyDictionary()
        """By chunk."""
        self._trained = SideTable()
        """About a chunk."""
        self._in_call: Any = 0
        """The tokens of the forward-backward call that is under way, or of the last one."""
        self._training: list[bool] = []
        """Whether the forward-backward call that is under way trains."""
        # Errors so far: tensors, which are read in the steps in which ranks are compared.
        self._times: dict[str, Any] = dict.fromkeys(_WRONG_DIVISORS, 0)
        self._not_finite: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """By chunk: how many losses that are NaN or infinite it was stepped on."""
        self._old_counts: list[tuple[Any, tuple[str, ...]]] = []
        """In this step: whether any router's count was above zero, as a tensor, and the user's code then."""

    def sites(self) -> Iterator[Site]:
        step, parameters = "forward_step", ("forward_step_func", "data_iterator", "model")
        schedules = "megatron.core.pipeline_parallel.schedules"
        yield site(schedules, {step: after(self._train_on)}, expected={step: parameters})

    # ------------------------------------------------------------------------ events
    def begin_call(self, call: Call) -> None:
        self._training.append(call.trains)
        if call.trains:
            self._in_call = 0
            self._compare_factors(call.chunks)
            if self.audit.looks():
                self._look_at_routers(call.chunks)

    @observes
    def _look_at_routers(self, chunks: list[Any]) -> None:
        """Look at the counts, without waiting for them, if the call is the first of a step."""
        states = (state for chunk in chunks for state in states_of(chunk))
        is_under_way = any(state.arrivals and not state.stepped for state in states)
        if is_under_way or not ever_arrived(chunks):
            return
        counts = [count for chunk in chunks for count in counts_in(chunk)]
        if counts:
            import torch

            self.ledger.judged["fresh-counts"] += 1
            self._old_counts.append((torch.stack([count.any() for count in counts]).any(), user_code()))

    @observes
    def _compare_factors(self, chunks: list[Any]) -> None:
        """Note gradients that are multiplied, as they are reduced, for the other way of dividing them."""
        for chunk in chunks:
            by_tokens, averages = chunk.config.calculate_per_token_loss, chunk.ddp_config.average_in_collective
            buffer = first_buffer(chunk)
            if buffer is not None and buffer.data_parallel_group.size() > 1:
                factor = buffer.gradient_scaling_factor
                if (factor == 1) != (by_tokens or averages):
                    what = f"calculate_per_token_loss is {by_tokens}, and buffers multiply gradients by {factor:g}"
                    self.ledger.report("tokens-counted", "factor", f"{what}, as it was not when they were made")

    def end_call(self, call: Call) -> None:
        self._training.pop()

    @observes
    def _train_on(
        self, result: Any, forward_step_func: Any, data_iterator: Any, model: Any, *_: Any, **__: Any
    ) -> None:
        if not self._training or not self._training[-1]:
            return
        output, num_tokens = result
        output = output[0] if isinstance(output, list) else output
        loss = output if getattr(output, "ndim", None) == 0 else None
        for part in self.audit.parts:
            part.trained_on(model, loss, num_tokens)

    def trained_on(self, chunk: Any, loss: Any, num_tokens: Any) -> None:
        trained = self._trained.get_or_make(chunk, _Trained)
        trained.count += 1
        self._in_call = self._in_call + num_tokens
        counted = self._counted.setdefault(chunk, _Counted())
        counted.tokens = counted.tokens + num_tokens
        if loss is not None:
            self.ledger.judged["tokens-counted losses"] += 1
            counted.loss = loss.detach()
            counted.not_finite = counted.not_finite + ~counted.loss.isfinite()
            trained.losses.append(counted.loss)

    def finishing(self, chunks: list[Any], num_tokens: Any) -> None:
        if num_tokens is None:
            return
        self.ledger.judged["tokens-counted divisors"] += 1
        for chunk in chunks:
            self._trained.get_or_make(chunk, _Trained).divisor = num_tokens
        of_chunks = [self._counted.get(chunk, _Counted()) for chunk in chunks]
        counted = sum(each.tokens for each in of_chunks)
        is_last_calls = (self._in_call == num_tokens) & (counted != num_tokens)
        self._times["normalizer"] = self._times["normalizer"] + is_last_calls
        for loss in (each.loss for each in of_chunks if each.loss is not None):
            self._times["without"] = self._times["without"] + ((counted == 0) & (loss != 0))

    def zeroed(self, buffer: Any) -> None:
        for chunk in [chunk for chunk in self._counted if first_buffer(chunk) is buffer]:
            del self._counted[chunk]

    # ------------------------------------------------------------------------ judged in the step
    def end_step(self, step: Step) -> None:
        for chunk in step.chunks:
            counted = self._counted.pop(chunk, _Counted())
            if step.succeeded:
                self._not_finite[chunk] = self._not_finite.get(chunk, 0) + counted.not_finite
        seen, self._old_counts = self._old_counts, []
        for is_counted, where in seen:
            if is_counted:  # Megatron's step has waited for the GPU by now
                what = "routers begin a step with tokens that they have counted before it"
                self.ledger.report("fresh-counts", "call", what, where)
        if self.audit.is_due():
            self.judge()

    def judge(self) -> None:
        """Report errors since the last time. Waits for a GPU."""
        for kind, what in _WRONG_DIVISORS.items():
            if int(self._times[kind]):
                self.ledger.report("tokens-counted", kind, what)
            self._times[kind] = 0
        for chunk, count in list(self._not_finite.items()):
            del self._not_finite[chunk]
            if int(count) and not self._is_finite(chunk):
                what = f"the optimizer has stepped on {int(count)} microbatches whose loss is NaN or infinite"
                self.ledger.report("tokens-counted", "loss", what)

    def _is_finite(self, chunk: Any) -> bool:
        """Return whether some elements of what this rank steps of a chunk are finite. Waits for a GPU."""
        stepped = [tensor for part in self.audit.models.optimizers_of(chunk) for tensor in stepped_by(part)]
        return all(bool(sample.isfinite().all()) for sample in sample_of(stepped).values())

    def forget(self) -> None:
        self._old_counts.clear()

    # ------------------------------------------------------------------------ compared by ranks
    def added_to(self, hashes: Any, chunks: list[Any]) -> Any:
        """Return hashes to compare with two rows more.

        The first has the number of microbatches, and the hash of their losses: 0 where losses are not here, not
        finite, or all alike but for their signs. The second has the divisor, a hash of the rates, and whether
        they are known. A rank that fails here adds zeros.
        """
        import torch

        row, other = rows = hashes.new_zeros(2, 3)
        for chunk in chunks:
            self._fill(row, other, self._trained.pop(chunk, _Trained()))
        self._fill_rates(other, chunks)
        return torch.cat([hashes, rows])

    @observes
    def _fill_rates(self, row: Any, chunks: list[Any]) -> None:
        optimizers = self.audit.models.optimizers_of(chunks[0])
        groups = [group for part in optimizers for group in getattr(part.optimizer, "param_groups", ())]
        rates = sorted({(float(group["lr"]), float(group.get("weight_decay", 0))) for group in groups})
        row[1], row[2] = zlib.crc32(repr(rates).encode()), bool(rates)

    @observes
    def _fill(self, row: Any, other: Any, trained: _Trained) -> None:
        import torch

        row[0], other[0] = trained.count, trained.divisor  # of the last chunk; all have the same
        if trained.losses:
            values = torch.stack([*trained.losses]).float()
            sizes = values.abs()  # of on-policy losses in groups of two only the signs differ
            row[1:] = hash_of([values]) * ((sizes != sizes[0]).any() & values.isfinite().all())

    @observes
    def judge_ranks(self, ranks: str, highest: list[list[int]], of_complements: list[list[int]]) -> None:
        """Note what the ranks of a data-parallel group should have alike, or not alike.

        Args:
            ranks: the group, in words.
            highest: the highest of these numbers on any rank, in two rows.
            of_complements: the highest of their complements.
        """
        (most, *losses), (divisor, rates, _) = highest
        (least, *others), (least_divisor, other_rates, lacking) = of_complements
        if divisor != ~least_divisor:
            what = f"{ranks} have divided gradients by {~least_divisor} to {divisor} tokens"
            self.ledger.report("tokens-counted", "ranks", what)
        if ~lacking and rates != ~other_rates:
            what = f"optimizers of {ranks} have other learning rates, or weight decay"
            self.ledger.report("ranks-agree", "rates", what)
        self.ledger.judged["calls-alike"] += most > 0
        self.ledger.judged["data-differs"] += any(losses)
        if most != ~least:
            what = f"{ranks} have trained on {~least} to {most} microbatches since they were compared"
            self.ledger.report("calls-alike", "data-parallel", what)
        elif any(losses) and losses == [~other for other in others]:
            self.ledger.report("data-differs", "data-parallel", f"{ranks} have had the same losses")
