"""Around a weight sync: generation paused (`paused_generation`), parameters whole (`gathered_parameters`).

`lent_weights` is for weights that come in the other direction, and do not stay.

async with paused_generation(client):      # `with` where no event loop is running
    with gathered_parameters(model):
        await broadcast_weights()
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any

from ._mcore.main_params import LOANS, are_lent
from ._mcore.param_gathers import ddps_of, gather_params
from ._pausing.blocking import Blocking, is_in_loop, without_loop
from ._pausing.generation import EVENT, PAUSE, RESUME, is_paused, log_failed_sync, resume_once
from ._pausing.waiting import Call, Outcome, attempt
from ._version import see
from .errors import MisuseError

__all__ = ["gathered_parameters", "lent_weights", "paused_generation"]

log = logging.getLogger("megapatch")

_WAYS_TO_PAUSE = (PAUSE, "abort_generation")
_NO_LOOP = "paused_generation() waits with asyncio, which is not running here: use `with` in a thread of its own"
_IN_LOOP = (
    "an event loop is running here, and `with` would block it: use `async with paused_generation(...)`, or "
    "`with` in a thread of its own, as by asyncio.to_thread()"
)

_warned: set[type] = set()


class gathered_parameters:
    """Make a model's parameters those of the last optimizer step on this rank, before they are read.

        gathered_parameters(model)              # now, until the next optimizer step
        with gathered_parameters(model):        # the same
            export(model)

    With the distributed optimizer and overlap_param_gather, optimizer.step() leaves each data-parallel rank with
    its own new shard of the parameters beside the others' old ones, until the next forward pass gathers them.
    Code that reads the parameters before that, to save or to export them, reads a mixture.

    This makes pending gathers, with Megatron's own methods, and waits for gathers under way. Where nothing is
    pending it does nothing, and no collective runs: without overlap_param_gather, after a forward pass, and when
    called again. Megatron-FSDP and FSDP2 gather in their own exports: there is nothing to do for them.

    Call it on all ranks: the same gathers are pending on all ranks of a data-parallel group, and all of them have
    to make these. Call it where the parameters are read: in a generator after its first `next`, not when made.

    Args:
        model: a model, or a list of model chunks, wrapped in DistributedDataParallel or not. For a model that is
            not, the DistributedDataParallel around it is found.

    Raises:
        MisuseError: `model` is something else; or something is pending that cannot be gathered now, as its buffer
            is offloaded, with reuse_grad_buf_for_mxfp8_param_ag, and with a layer-wise optimizer. The message says
            how to avoid it. No collective has run by then.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        gather_params(ddps_of(model))

    def __enter__(self) -> Any:
        gather_params(ddps_of(self._model))  # made before an optimizer step, perhaps
        return self._model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the parameters as they are: whole until the next optimizer step."""


class paused_generation:
    """Pause generation, run the body (a weight sync), resume generation. Each instance can be used once.

    The value of `as` is whether generation is paused in the body. It depends on the state on entry:

    running         it is paused, and resumed after the body, however that ends
    already paused  (the client's `generation_paused_event` is set) it is neither paused nor resumed
    not pausable    the client or its engines lack the method, or it raises NotImplementedError: nothing was paused
                    then, and the body still runs, with one warning per class of clients

    If pausing fails or is cancelled, the body does not run, and generation is left running. The event is cleared
    if pausing had set it. A client without an event asks servers, some of which may be paused, so it is asked to
    resume; this comes too early for a server that has yet to get the request to pause.

    If the body fails or is cancelled, an ERROR on the logger "megapatch" says that engines may hold a mixture of
    old and new weights. The exception of the body is raised after generation was resumed.

    If resuming fails, it is not attempted again. Its exception is raised; or, when another is already being
    raised, it is added to that as a note (from Python 3.11 on) and logged as an ERROR.

    Cancellation, however often, does not reach the resume, and is delivered when that is over; a failure of the
    body is then its `__context__`. The same holds for Ctrl-C in a `with`. Only two things interrupt a resume: the
    cancellation of all tasks of the event loop, as by asyncio.run() at its end, and a second Ctrl-C in a `with`.
    Ctrl-C between the last line of the body and the first one of ours leaves generation paused, as Python has no
    way to keep it out of there.

    Results of `pause` and `resume` are waited for: an awaitable such as Ray's ObjectRef, a
    `concurrent.futures.Future`, and each of several in a dict, list, tuple or set. A generator or a function, in
    which nothing may have run, is a MisuseError, as a failure of that call. So is another handle of work, such as
    torch's Work or a thread. Anything else is a result.

    A CancelledError that the client raises by itself is a failure like others, as a MegapatchError.

    `async with` needs asyncio. `with` blocks, with one event loop for both calls. It runs in threads of its own,
    nothing runs in it meanwhile, and it is closed at the end. A client whose connections are bound to a loop and
    outlive a sync needs `async with`. Where an event loop is running, `with` is refused before anything is paused:
    nobody knows whether `resume` would need that loop.

    Callers have to keep two syncs from overlapping: the second one takes generation as paused, and the first one
    resumes it.

    Args:
        client: has `pause_generation` and `resume_generation`: coroutine functions, plain functions, or methods of
            a Ray actor, whose handle `client` is then. May be None if both functions are given.
        pause: called without arguments in place of `client.pause_generation`.
        resume: called likewise in place of `client.resume_generation`.

    Raises:
        MisuseError: on entry: it was used before, `with` was used in an event loop, or `async with` in one that is
            not asyncio's.
    """

    def __init__(self, client: object, *, pause: Call | None = None, resume: Call | None = None) -> None:
        self._client = client
        self._pause = pause or getattr(client, PAUSE, None)
        self._resume = resume or getattr(client, RESUME, None)
        self._used = self._to_resume = False

    async def __aenter__(self) -> bool:
        if not is_in_loop():
            raise MisuseError(_NO_LOOP)
        try:
            return await self._enter(attempt)
        except BaseException as error:
            await self._undo(error, attempt)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit(error, attempt)

    def __enter__(self) -> bool:
        if is_in_loop():
            raise MisuseError(_IN_LOOP)  # before a pause that could not be undone
        self._blocking = Blocking()
        try:
            return without_loop(self._enter(self._blocking.attempt))
        except BaseException as error:
            self._undo_and_close(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            without_loop(self._exit(error, self._blocking.attempt))
            self._blocking.close()
        except BaseException as failure:
            self._undo_and_close(failure)
            raise

    async def _enter(self, attempt: Callable[..., Awaitable[Outcome]]) -> bool:
        if self._used:
            raise MisuseError("paused_generation() was already used; make a new one for each weight sync")
        self._used = True
        if is_paused(self._client):
            return True
        if self._pause is None or self._resume is None:
            _warn(self._client, f"it has no {PAUSE if self._pause is None else RESUME}")
            return False
        self._to_resume = True
        failure, cancelled = await attempt(self._pause, f"{PAUSE}()", interruptible=True)
        if failure is not None and getattr(self._client, EVENT, None) is not None:
            getattr(self._client, EVENT).clear()
        if failure is not None and cancelled is None and _cannot_pause(failure):
            self._to_resume = False
            _warn(self._client, f"{type(failure).__name__}: {failure}")
            return False
        if (error := cancelled or failure) is not None:
            raise error
        return True

    async def _exit(self, error: BaseException | None, attempt: Callable[..., Awaitable[Outcome]]) -> None:
        if error is not None:
            log_failed_sync(error)
        if self._to_resume:
            await self._resume_now(error, attempt)

    async def _resume_now(self, error: BaseException | None, attempt: Callable[..., Awaitable[Outcome]]) -> None:
        async def attempt_once(call: Call, what: str) -> Outcome:
            outcome = await attempt(call, what)
            self._to_resume = False  # and not if Ctrl-C has come before the call, or in it
            return outcome

        assert self._resume is not None  # else nothing was paused
        await resume_once(self._resume, error, attempt_once)

    async def _undo(self, error: BaseException, attempt: Callable[..., Awaitable[Outcome]]) -> None:
        """Resume what may be paused, unless the client's event says that it is not."""
        if self._to_resume and (getattr(self._client, EVENT, None) is None or is_paused(self._client)):
            await self._resume_now(error, attempt)

    def _undo_and_close(self, error: BaseException) -> None:
        try:
            without_loop(self._undo(error, self._blocking.attempt))
        finally:
            self._blocking.close()


# ------------------------------------------------------------------------------------------ warnings
def _cannot_pause(error: BaseException) -> bool:
    """Return whether the error means that the engine cannot pause.

    An AttributeError may have any cause; that of an engine, possibly through Ray, can only be told by its text.
    """
    if isinstance(error, AttributeError):
        return any(f"no attribute '{name}'" in str(error) for name in _WAYS_TO_PAUSE)
    return isinstance(error, NotImplementedError)


def _warn(client: object, why: str) -> None:
    if type(client) not in _warned:
        _warned.add(type(client))
        log.warning(
            "%s cannot pause generation (%s): weights are synced while it runs, and requests in flight may see a "
            "mixture of old and new weights" + see("no-pause"),
            type(client).__name__,
            why,
        )


@contextlib.contextmanager
def lent_weights() -> Iterator[None]:
    """Take what this thread loads inside for lent, not restored: the optimizer's main parameters stay as they are.

        with lent_weights():
            model.load_state_dict(quantized)  # the next optimizer step keeps its own full precision

    With bf16 and fp16 an optimizer steps main parameters of its own, in fp32, and writes them into the model. Of
    weights that were loaded without optimizer state the patch `megatron.main-params-after-load` cannot always tell
    whether the step should start from them. Inside it asks nothing and says nothing. After a load that should be
    started from call Megatron's ``optimizer.reload_model_params()`` instead.
    """
    before, LOANS.under_way = are_lent(), True
    try:
        yield
    finally:
        LOANS.under_way = before
