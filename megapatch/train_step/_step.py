"""A step as its caller sees it, and the order of its calls. _megatron.py does the work."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from .._mcore import bucket_groups
from ..errors import MisuseError
from . import _open_steps
from ._guard import Guard
from ._megatron import MegatronStep
from ._result import Optimizer, Scheduler, StepResult


class TrainStep:
    """One optimizer step from any number of forward-backward calls.

        with megapatch.TrainStep(model, optimizer, scheduler) as step:
            for microbatches in arriving:
                step.forward_backward(forward_step_func=..., data_iterator=..., num_microbatches=..., ...)
            result = step.finish(increment=global_batch_size)

    The gradient is that of a single call with all microbatches. It is reduced over data parallel once: in
    `finish`, or in a call that is said to be the `last` one.

    If the calls are far apart, use `begin()` and, on failure, `abort()` in place of the `with`. One object serves
    for any number of steps, one after another.

    There are four ways to normalize the loss; all ranks use the same:

    mean     A loss function returns (mean, metrics). The gradient is that of the mean over microbatches, whichever
             call they are in, and then over data-parallel ranks. With (sum, tokens, metrics) Megatron first
             divides each microbatch by its own tokens. While the step is open, losses are divided by
             `expected_microbatches`, or without it by the number of microbatches in the first call.
    tokens   The model config sets calculate_per_token_loss and a loss function returns (sum, tokens, metrics). The
             sum of all losses is divided by the sum of all tokens.
    count    `expected_count` is set and a loss function returns (sum, metrics). The sum of all losses is divided
             by the sum of the counts given to the calls (tokens, sequences or anything else) over data-parallel
             ranks. While the step is open, losses are divided by `expected_count`. Megatron takes the mean of the
             losses of a mixture of experts' router and of multi-token prediction. They weigh as if a rank had
             `expected_microbatches`, and are divided by the count likewise; if calculate_per_token_loss is set,
             Megatron has already multiplied them by tokens, so count tokens there.
    added up `calls_add_up` is set: the caller has divided the losses by the total of the whole step. The gradient
             is the sum of the calls' own gradients. Other losses (a router's,
             multi-token prediction's) are the mean of each call, added up; with `expected_microbatches`, which
             then has to be exact, they are divided by that instead. If the total is not known yet, divide by an
             `expected_count` and give each call its count: the sum is multiplied by expected_count over the sum of
             the counts (other losses as in "count"). Tokens that Megatron counts are ignored.

    The divisor that is used while the step is open keeps a loss scale, or bf16 buffers, in their range. Set it to
    about the expected total, the same on all ranks. The result does not depend on it.

    An exception in a call, in `finish` or in the body of the `with` restores the state before `begin`, with
    gradients zeroed, and is re-raised unchanged. The state includes a router's counts and expert bias, losses of
    the model's own that wait to be logged, and an fp16 loss scale. The next step is that of a process in which
    this one never began. That needs an exception on all ranks, before the optimizer changed parameters. Random
    numbers that were drawn stay drawn.

    Args:
        model: Megatron's DistributedDataParallel, or the list of a rank's chunks.
        optimizer: Megatron's.
        scheduler: Megatron's OptimizerParamScheduler; None for none.
        expected_count: about the sum of all counts of a step, over data-parallel ranks; see "count" above.
        expected_microbatches: about how many microbatches a rank has in a step; see above.
        calls_add_up: whether the caller divides the losses; see "added up" above.
        step_scheduler_on_skip: whether the scheduler steps after a step that was skipped for an overflow.
            Megatron's own train() does not do that; NeMo-RL does.

    Raises:
        MisuseError: options conflict with each other or with the model. It is a RuntimeError, under
            MegapatchError; every method that is called out of order raises it, too.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        scheduler: Scheduler | None = None,
        *,
        expected_count: float | None = None,
        expected_microbatches: int | None = None,
        calls_add_up: bool = False,
        step_scheduler_on_skip: bool = False,
    ) -> None:
        for name, value in (("expected_count", expected_count), ("expected_microbatches", expected_microbatches)):
            if value is not None and not 0 < value < math.inf:
                raise MisuseError(f"{name} is {value!r}; expected a finite number above 0")
        self._megatron = MegatronStep(
            _chunks_of(model),
            optimizer,
            scheduler,
            expected_count=expected_count,
            expected_microbatches=expected_microbatches,
            calls_add_up=calls_add_up,
            step_scheduler_on_skip=step_scheduler_on_skip,
        )
        self._optimizer, self._scheduler = optimizer, scheduler
        self._counts = expected_count is not None
        self._guard = Guard(self)
        self._open = self._aside = self._in_call = self._reduced = False
        self._ended = "begin() was not called"

    @property
    def is_open(self) -> bool:
        """Whether a step is open, or set aside: from `begin` to `finish`, `reduce`, `abort` or an exception."""
        return self._open

    def begin(self) -> None:
        """Zero all gradients, and open the step for calls.

        Raises:
            MisuseError: this or another step of the model is open.
        """
        if self._aside:
            raise MisuseError("begin(): this step was set aside; call take_up() or abort() first")
        self._check_model("begin()")
        self._keep()
        self._megatron.forget()
        with self._aborting():
            self._open = True  # first: an interruption from here on drops the step
            self._take_model()
            self._megatron.begin()

    @contextlib.contextmanager
    def accumulate(self, num_microbatches: int, count: float | None = None, last: bool = False) -> Iterator[None]:
        """Wrap one call of any of Megatron's schedules, which the body makes itself in any way.

        Args:
            num_microbatches: of this call, on this rank.
            count: with `expected_count`: tokens, sequences, ... of this call on this data-parallel rank.
            last: whether this is the step's last call, on all ranks alike. With overlap_grad_reduce the reduce
                then overlaps with its backward passes; without this it waits for `finish`. (From Megatron 0.16 on
                not in the first such step, in which Megatron learns when gradients are ready.)

        Raises:
            MisuseError: no step is open, or its last call was made; `count` is missing or not expected; or the
                body did not make exactly one call with `num_microbatches`.
        """
        self._check_open("accumulate()")
        if num_microbatches < 1:
            raise MisuseError(f"num_microbatches is {num_microbatches!r}; expected 1 or more")
        if self._counts and count is None:
            raise MisuseError("this step has an expected_count: each call needs its count=")
        if not self._counts and count is not None:
            raise MisuseError("count= goes together with TrainStep(..., expected_count=...)")
        with self._aborting(own_work=False):
            try:
                self._in_call = True
                with self._megatron.accumulate(num_microbatches, count, last):
                    yield
            finally:
                self._in_call = False

    def forward_backward(
        self, *, num_microbatches: int, count: float | None = None, last: bool = False, **arguments: Any
    ) -> Any:
        """Call Megatron's own schedule for this layout, within `accumulate`.

        Args:
            num_microbatches: of this call, on this rank.
            count: with `expected_count`: tokens, sequences, ... of this call on this data-parallel rank.
            last: whether this is the step's last call; see `accumulate`.
            **arguments: passed on to the schedule, which also gets the model and ``forward_only=False``.

        Returns:
            The result of the schedule.

        Raises:
            MisuseError: as `accumulate`.
        """
        with self.accumulate(num_microbatches, count, last):
            return self._megatron.forward_backward(num_microbatches, **arguments)

    def finish(self, increment: int | None = None) -> StepResult:
        """Reduce and normalize the gradient, step the optimizer and, if that succeeded, the scheduler.

        Args:
            increment: how far the scheduler moves: the samples of this step, over all ranks.

        Raises:
            MisuseError: no step is open, or it had no call on a rank that needs one; `increment` is missing; the
                gradient's divisor is 0; or gradient buffers were freed.
        """
        self._check_open("finish()")
        with self._aborting():
            result = self._megatron.finish(increment)
            self._close("it was finished")
        return result

    def reduce(self) -> float:
        """Reduce and normalize the gradient and end the step, for callers that step the optimizer themselves.

        Gradients stay until the next `begin`. Until the optimizer has stepped, or has loaded, or another step of
        the model begins, `abort` and an exception in the body of the `with` still drop the step.

        Returns:
            The gradient's divisor, as `StepResult.normalizer`.

        Raises:
            MisuseError: as `finish`, whose `increment` is not needed.
        """
        self._check_open("reduce()")
        with self._aborting():
            normalizer = self._megatron.reduce()
            self._guard.stop()
            self._guard.notice_moves(self._optimizer, self._keep)
            self._open, self._reduced, self._ended = False, True, "it was reduced"
        return normalizer

    def abort(self) -> None:
        """Drop the step: zero the gradients and step nothing.

        Does nothing if no step is open, unless it was reduced and the optimizer has not stepped; see `reduce`.
        """
        can_be_undone = self._reduced and _open_steps.is_latest(self._megatron.chunks, self)
        if self._open or can_be_undone:
            self._drop("it was aborted")

    def set_aside(self) -> None:
        """Stay open, but let another step of the model begin.

        For adapters that take turns in one model: the caller takes the gradients out of their buffers, and puts
        them back before `take_up`.

        Raises:
            MisuseError: no step is open, or its last call was made.
        """
        self._check_open("set_aside()")
        self._megatron.set_aside()
        self._aside = True
        _open_steps.leave(self._megatron.chunks)
        self._guard.stop()

    def take_up(self) -> None:
        """Resume the step after `set_aside`.

        Raises:
            MisuseError: the step was not set aside, or another step of the model is open.
        """
        if not self._aside:
            raise MisuseError("take_up() needs a step that was set aside")
        self._check_model("take_up()")
        self._take_model()
        self._aside = False
        self._megatron.take_up()

    def __enter__(self) -> TrainStep:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left_open = self._open
        if left_open or error is not None:
            self.abort()
        if left_open and error is None:
            raise MisuseError("the `with` ended without finish(): the gradients of its calls are dropped")

    @contextlib.contextmanager
    def _aborting(self, own_work: bool = True) -> Iterator[None]:
        try:
            self._guard.is_lifted = own_work
            yield
            self._guard.is_lifted = False
        except BaseException as error:
            if self._open:
                self._drop(f"it was aborted by {type(error).__name__}: {error}")
            raise

    def _drop(self, how: str) -> None:
        """Zero gradients, put back the state from before the step, and close it; if interrupted, start over."""
        try:
            self._drop_once(how)
        except Exception:
            self._close(how)
            raise
        except BaseException:
            self._drop_once(how)
            raise

    def _drop_once(self, how: str) -> None:
        self._guard.is_lifted = True
        if self._aside:
            self._megatron.abort_aside()
        else:
            self._megatron.abort()
        self._close(how)

    def _check_open(self, call: str) -> None:
        if not self._open:
            raise MisuseError(f"{call} needs an open step: {self._ended}")
        if self._aside:
            raise MisuseError(f"{call}: this step was set aside; call take_up() first")
        if self._in_call:
            raise MisuseError(f"{call} within accumulate(): its body is for one call of Megatron's own schedule")

    def _keep(self) -> None:
        """Leave a step that was reduced as it is: its optimizer has stepped, or another step begins."""
        self._guard.stop()
        self._reduced = False

    def _close(self, how: str) -> None:
        if not self._aside:
            _open_steps.leave(self._megatron.chunks)
        self._guard.stop()
        self._open = self._aside = self._in_call = self._reduced = self._guard.is_lifted = False
        self._ended = how

    def _check_model(self, call: str) -> None:
        if _open_steps.open_step(self._megatron.chunks) is not None:
            raise MisuseError(f"a step of this model is open already; call its finish() or abort() before {call}")

    def _take_model(self) -> None:
        _open_steps.take(self._megatron.chunks, self)
        self._guard.refuse(self._megatron.chunks, self._optimizer, self._scheduler)


def _chunks_of(model: Any) -> list[Any]:
    """Return the model's chunks, or raise MisuseError if they are not Megatron's."""
    if (chunks := bucket_groups.chunks_of(model)) is not None:
        return chunks
    kinds = sorted({type(chunk).__name__ for chunk in (model if isinstance(model, (list, tuple)) else [model])})
    raise MisuseError(
        f"model is {', '.join(kinds) or 'an empty list'}; expected Megatron's DistributedDataParallel, or a list "
        "of them: TrainStep is not for torch's FSDP2, nor for Megatron-FSDP"
    )
