"""tokens-counted, fresh-counts: a step counts the tokens of all its calls, and of no other step.

Watches   forward_step() of the schedules, which shows each microbatch's tokens and loss, and
          finalize_model_grads(), which shows their divisor: with calculate_per_token_loss, often by the tokens
          of a step's last call only. In all releases. And, as calls that train begin in the steps that are looked
          at closely, the routers' counts for the expert bias (from 0.12 on) and of the global auxiliary loss (from
          0.15 on), which finalize_model_grads() zeroes.
Limits    a division that a trainer makes itself is not seen. Losses are looked at in successful steps only:
          after an fp16 overflow they may be NaN. A call is a step's first if no gradient has arrived since they
          were zeroed. Routers of models that were wrapped before any audit began are not judged, nor those of a
          model's first step.
Cost      three small operations a microbatch; waits for a GPU in the steps in which ranks are compared. A small
          operation a router as such a call begins; the result is read as the step ends.
"""

from __future__ import annotations

import weakref
from itertools import islice
from typing import Any

from .._mcore.side_table import SideTable
from .._mcore.step_state import counts_in
from ..patch import Site
from ._audit import Audit, Call, Part, Step
from ._buckets import ever_arrived, states_of
from ._findings import observes, user_code
from ._models import grad_buffers
from ._watching import after, site


class TokensCounted(Part):
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self._counted = SideTable()
        """About a chunk's first gradient buffer: the tokens of the microbatches since it was zeroed."""
        self._in_call: Any = 0
        """The tokens of the forward-backward call that is under way, or of the last one."""
        self._training: list[bool] = []
        """Whether the forward-backward call that is under way trains."""
        self._not_finite: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """By chunk: how many losses of the step that is being made are NaN or infinite."""
        # Errors so far: tensors, which are read in the steps in which ranks are compared.
        self._times_uncounted: Any = 0
        self._losses_not_finite: Any = 0
        self._old_counts: list[tuple[Any, tuple[str, ...]]] = []
        """In this step: whether any router's count was above zero, as a tensor, and the user's code then."""

    def sites(self) -> tuple[Site, ...]:
        return (
            site(
                "megatron.core.pipeline_parallel.schedules",
                {"forward_step": after(self._train_on)},
                expected={"forward_step": ("forward_step_func", "data_iterator", "model")},
            ),
        )

    # ------------------------------------------------------------------------ events
    def begin_call(self, call: Call) -> None:
        self._training.append(call.trains)
        if call.trains:
            self._in_call = 0
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

    @observes
    def trained_on(self, chunk: Any, loss: Any, num_tokens: Any) -> None:
        self.ledger.judged["tokens-counted"] += 1
        self._in_call = self._in_call + num_tokens
        for buffer in islice(grad_buffers([chunk]), 1):
            self._counted.set(buffer, self._counted.get(buffer, 0) + num_tokens)
        if loss is not None:
            self._not_finite[chunk] = self._not_finite.get(chunk, 0) + ~loss.detach().isfinite()

    @observes
    def finishing(self, chunks: list[Any], num_tokens: Any) -> None:
        if num_tokens is None:
            return
        first_buffers = [buffer for chunk in chunks for buffer in islice(grad_buffers([chunk]), 1)]
        counted = sum(self._counted.get(buffer, 0) for buffer in first_buffers)
        is_last_calls = (self._in_call == num_tokens) & (counted != num_tokens)
        self._times_uncounted = self._times_uncounted + is_last_calls

    @observes
    def zeroed(self, buffer: Any) -> None:
        self._counted.pop(buffer, None)

    # ------------------------------------------------------------------------ judged in the step
    @observes
    def end_step(self, step: Step) -> None:
        for chunk in step.chunks:
            not_finite = self._not_finite.pop(chunk, 0)
            if step.succeeded:
                self._losses_not_finite = self._losses_not_finite + not_finite
            for buffer in islice(grad_buffers([chunk]), 1):
                self._counted.pop(buffer, None)
        seen, self._old_counts = self._old_counts, []
        for is_counted, where in seen:
            if is_counted:  # Megatron's step has waited for the GPU by now
                what = "routers begin a step with tokens that they have counted before it"
                self.ledger.report("fresh-counts", "call", what, where)
        if self.audit.is_due():
            self.judge()

    @observes
    def judge(self) -> None:
        """Report errors since the last time. Waits for a GPU."""
        uncounted, not_finite = int(self._times_uncounted), int(self._losses_not_finite)
        self._times_uncounted = self._losses_not_finite = 0
        if uncounted:
            what = "gradients of several calls were divided by the number of tokens of the last one"
            self.ledger.report("tokens-counted", "normalizer", what)
        if not_finite:
            what = f"the optimizer has stepped on {not_finite} microbatches whose loss is NaN or infinite"
            self.ledger.report("tokens-counted", "loss", what)

    @observes
    def forget(self) -> None:
        self._old_counts.clear()
