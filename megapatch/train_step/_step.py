"""What a caller sees of a step, and in which order it may be called. How it is done: _megatron.py, _fsdp2.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ..errors import MisuseError
from . import _open_steps
from ._backend import Backend, Options, StepResult


class TrainStep:
    """One optimizer step from any number of forward-backward calls.

        with megapatch.TrainStep(model, optimizer, scheduler) as step:
            for piece in pieces:
                step.forward_backward(forward_step_func=..., data_iterator=..., num_microbatches=..., ...)
            result = step.finish(increment=global_batch_size)

    The gradient is that of one single call with all microbatches, and it is reduced over data parallel once, in
    `finish`. A step whose calls are far apart has `begin()` and, on failure, `abort()` instead of the `with`; the
    same object serves for one step after the other.

    model       Megatron's DistributedDataParallel, or the list of a rank's chunks; or a module with FSDP2's
                fully_shard applied
    optimizer   Megatron's, or a torch.optim.Optimizer with FSDP2
    scheduler   Megatron's OptimizerParamScheduler, or torch's; None where there is none
    expected_count          see "count" below
    expected_microbatches   about how many microbatches a rank has in a step; see below
    calls_add_up            losses are divided by the caller; see "added up" below
    step_scheduler_on_skip  whether the scheduler goes on after a step that was skipped for an overflow. Megatron's
                            own train() does not; NeMo-RL does.
    max_grad_norm           with FSDP2: clip gradients to this norm. Megatron's optimizer has its own clip_grad.

    Ways to normalize a loss; all ranks take the same:

    mean     a loss function returns (mean, metrics): the mean over microbatches, whichever call they are in, and
             then over data-parallel ranks. With (sum, tokens, metrics) Megatron divides each microbatch by its
             own tokens first. While the step is open, losses are divided by `expected_microbatches` (without it,
             by the first call's).
    tokens   the model config's calculate_per_token_loss is set and a loss function returns (sum, tokens, metrics):
             the sum of all losses by the sum of all tokens.
    count    `expected_count` is set and a loss function returns (sum, metrics): the sum of all losses by the sum
             of the counts that the calls were given (tokens, sequences, whatever), over data-parallel ranks. While
             the step is open, losses are divided by `expected_count`. The losses of a mixture of experts' router
             and of multi-token prediction, which Megatron takes the mean of, weigh as if a rank had
             `expected_microbatches`, and are divided by the count likewise; where calculate_per_token_loss is set,
             Megatron has multiplied them by tokens already, so count tokens there.
    added up `calls_add_up` is set: the sum of the gradients that each call alone would give, for a caller who has
             divided the losses by what the whole step comes to. Others (a router's, multi-token prediction's)
             are means of each call's, added up; with `expected_microbatches` they are divided by these instead,
             which then have to be exact. A caller who does not know yet what the step comes to divides by an
             `expected_count`, gives each call its count, and the sum is multiplied by expected_count over the
             sum of the counts (others as in "count"). Tokens that Megatron counts count nothing. Not with FSDP2.

    With FSDP2 the mean is over all microbatches of all ranks, each of which weighs the same. A rank that has fewer
    of them in a call makes passes whose loss counts nothing.

    What losses are divided by while the step is open keeps a loss scale, or bf16 buffers, in their range: about
    what it will come to, the same on all ranks. The result does not depend on it.

    Raises MisuseError (a RuntimeError, under MegapatchError) when called in a wrong order or with what does not go
    together. An exception in a call, in `finish` or in the body of the `with` leaves everything as before `begin`,
    with gradients zeroed, and is raised as it is; the next step is a fresh one, if all ranks had an exception.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        *,
        expected_count: float | None = None,
        expected_microbatches: int | None = None,
        calls_add_up: bool = False,
        step_scheduler_on_skip: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        for name, value in (("expected_count", expected_count), ("expected_microbatches", expected_microbatches)):
            if value is not None and not value > 0:
                raise MisuseError(f"{name} is {value!r}; expected a number above 0")
        options = Options(
            expected_count, expected_microbatches, calls_add_up, step_scheduler_on_skip, max_grad_norm
        )
        self._backend = _backend_for(model, optimizer, scheduler, options)
        self._counts = expected_count is not None
        self._open = self._aside = self._in_call = False
        self._ended = "begin() was not called"

    @property
    def is_open(self) -> bool:
        return self._open

    def begin(self) -> None:
        """Zero all gradients, and take calls from now on."""
        if self._aside:
            raise MisuseError("begin(): this step was set aside; take_up() or abort() it before")
        self._take_model("begin()")
        self._open = True
        with self._aborting():
            self._backend.begin()

    @contextlib.contextmanager
    def accumulate(self, num_microbatches: int, count: float | None = None) -> Iterator[Any]:
        """Around one call of any of Megatron's schedules, which the body makes itself, however it likes.

        num_microbatches   of that call, on this rank
        count              with `expected_count`: tokens, sequences, ... of this call on this data-parallel rank

        With FSDP2 the value of `as` is a function that takes the place of ``loss.backward()``. It is to be called
        as often as its attribute `passes` says: what the rank with the most microbatches has in this call. After a
        rank's own microbatches the loss may be any; it counts nothing.
        """
        self._check_open("accumulate()")
        fewest = self._backend.fewest_microbatches
        if num_microbatches < fewest:
            raise MisuseError(f"num_microbatches is {num_microbatches!r}; expected {fewest} or more")
        if self._counts and count is None:
            raise MisuseError("this step has an expected_count: each call needs its count=")
        if not self._counts and count is not None:
            raise MisuseError("count= goes together with TrainStep(..., expected_count=...)")
        self._in_call = True
        try:
            with self._aborting(), self._backend.accumulate(num_microbatches, count) as value:
                yield value
        finally:
            self._in_call = False

    def forward_backward(self, *, num_microbatches: int, count: float | None = None, **arguments: Any) -> Any:
        """`accumulate` around Megatron's own schedule for this layout, with these keyword arguments; its result.

        With FSDP2: forward_step_func and data_iterator are as for Megatron; the metrics of each microbatch.
        """
        with self.accumulate(num_microbatches, count):
            return self._backend.forward_backward(num_microbatches, **arguments)

    def finish(self, increment: int | None = None) -> StepResult:
        """Reduce and normalize the gradient, step the optimizer and, if that succeeded, the scheduler.

        increment   by which Megatron's scheduler moves: the samples of this step, over all ranks
        """
        self._check_open("finish()")
        with self._aborting():
            result = self._backend.finish(increment)
        self._close("it was finished")
        return result

    def reduce(self) -> float:
        """Reduce and normalize the gradient, and end the step: the optimizer is the caller's to step. What the
        gradient was divided by, as `StepResult.normalizer`. Gradients stay until the next `begin`."""
        self._check_open("reduce()")
        with self._aborting():
            normalizer = self._backend.reduce()
        self._close("it was reduced")
        return normalizer

    def abort(self) -> None:
        """Give the step up: gradients zeroed, nothing stepped. Does nothing where no step is open."""
        if self._open:
            in_buffers = not self._aside
            self._close("it was aborted")
            if in_buffers:
                self._backend.abort()

    def set_aside(self) -> None:
        """Stay open, and let another step of the model be: for adapters that take turns in one model, where the
        caller takes the gradients out of their buffers, and puts them back before `take_up`."""
        self._check_open("set_aside()")
        _open_steps.leave(self._backend.chunks)
        self._aside = True

    def take_up(self) -> None:
        """Go on after `set_aside`."""
        if not self._aside:
            raise MisuseError("take_up() needs a step that was set aside")
        self._take_model("take_up()")
        self._aside = False

    def __enter__(self) -> TrainStep:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left_open = self._open
        self.abort()
        if left_open and error is None:
            raise MisuseError("the `with` ended without finish(): the gradients of its calls are dropped")

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._open:
                self._close(f"it was aborted by {type(error).__name__}: {error}")
                self._backend.abort()
            raise

    def _check_open(self, what: str) -> None:
        if not self._open:
            raise MisuseError(f"{what} needs an open step: {self._ended}")
        if self._aside:
            raise MisuseError(f"{what}: this step was set aside; take_up() before")
        if self._in_call:
            raise MisuseError(f"{what} within accumulate(): its body is for one call of Megatron's own schedule")

    def _close(self, how: str) -> None:
        if not self._aside:
            _open_steps.leave(self._backend.chunks)
        self._open, self._aside, self._ended = False, False, how

    def _take_model(self, what: str) -> None:
        if _open_steps.open_step(self._backend.chunks) is not None:
            raise MisuseError(f"a step of this model is open already; finish() or abort() it before {what}")
        _open_steps.take(self._backend.chunks, self)


def _backend_for(model: Any, optimizer: Any, scheduler: Any, options: Options) -> Backend:
    from . import _fsdp2, _megatron

    if (chunks := _megatron.chunks_of(model)) is not None:
        return _megatron.MegatronBackend(chunks, optimizer, scheduler, options)
    if (chunks := _fsdp2.chunks_of(model)) is not None:
        return _fsdp2.FSDP2Backend(chunks, optimizer, scheduler, options)
    kinds = sorted({type(chunk).__name__ for chunk in (model if isinstance(model, (list, tuple)) else [model])})
    raise MisuseError(
        f"model is {', '.join(kinds) or 'an empty list'}; expected Megatron's DistributedDataParallel, a list of "
        "them, or a module with FSDP2's fully_shard applied"
    )
