"""A save that fails on one rank fails on all ranks, instead of leaving the others to wait for it.

Symptom   rank 0 writes a checkpoint's metadata alone. Where it cannot (a full disk, a lost mount: OSError), it
          raises, and all other ranks wait in the next collective until their timeout. The same with a finalize
          function of rank 0 alone, such as the one that writes latest_checkpointed_iteration.txt; and up to 0.13
          with each error of writing: rank 0 alone raises "CheckpointException", or another rank "Worker failure"
          while rank 0 waits. A trainer that catches the error and continues hangs in the middle of the next step.
Upstream  not reported; in 0.12 to 0.19 and on main, and in nvidia-resiliency-ext 0.4 to 0.7. From 0.14 on, all
          ranks raise when writing has failed, and not when the metadata have.
Seam      where ranks finalize a save together: save_state_dict_async_finalize(); dist_checkpointing.save() with
          save_config() and save_integrity_manifest(); AsyncCallsQueue.schedule_async_request(), which joins a
          request's finalize functions into one, and in nvidia-resiliency-ext
          AsyncRequest.execute_finalize_fns(). An error in rank 0's own work is held back until all ranks have
          left the surrounding collectives; then the ranks ask each other whether one has failed. A rank that
          failed raises its own error. The others raise MegapatchError, which says which rank failed.
Limits    an error before the checkpoint is finalized is not shared: in planning, and of rank 0 in writing
          common.pt. Nor is one of rank 0 after dist_checkpointing.save(), where trainers write the file that names
          the latest checkpoint after a synchronous save.
          A persistent worker that dies, as where memory ends, ends no save: its rank waits for it, and the others
          for that rank until their timeout (SkyRL#1960).
          If a trainer's own finalize function waits for all ranks, the others still wait for the failed one.
          KeyboardInterrupt and SystemExit are raised at once, on their rank alone.
          The folder of a failed save stays as it is, without metadata.
Cost      when a save is finalized: two all-reduces of 4 bytes in a synchronous one (three up to 0.14), four in an
          asynchronous one, and one more with hashes of all files. Nothing in a step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from ..._mcore.devices import device_of
from ..._mcore.known import is_a
from ..._python.dotted import temporarily_set
from ..._version import see
from ...errors import MegapatchError
from ...patch import Patch, Site
from ._diagnoses_of_save_failures import (
    diagnose_checkpoint,
    diagnose_finalize,
    diagnose_manifest,
    diagnose_queue,
    diagnose_request,
)

STRATEGIES = "megatron.core.dist_checkpointing.strategies"
NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
STORAGE = "torch.distributed.checkpoint.storage:StorageWriter"
RANKS = "torch.distributed.checkpoint.utils:_DistWrapper"
KNOWN = "_megapatch_all_ranks_know"
"""Attribute of an error that has been raised on all ranks: built-in exceptions take no weak references."""

_logger = logging.getLogger("megapatch")


# ------------------------------------------------------------------------------------------ an error of some ranks
class Failure:
    """The first error of this rank, kept until it is where all ranks can learn of it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error of what is done here, if there is none yet. KeyboardInterrupt and SystemExit pass."""
        from torch.distributed.checkpoint.api import CheckpointException  # not an Exception: torch 2.6 to 2.15

        try:
            yield
        except (Exception, CheckpointException) as error:
            if self.error is not None:
                return
            self.error = error
            if not hasattr(error, KNOWN):
                # Logged here, as others may never come to where they would learn of it.
                _logger.error(
                    "megatron.save-fails-everywhere: on this rank a save failed with %s; it is raised on all ranks"
                    + see("save-fails"),
                    _in_words(error),
                )

    def raise_everywhere(self, group: Any = None) -> None:
        """Raise on all ranks of a group if one has an error: its own, or one that names it. A collective."""
        try:
            failed = self._ranks_failed(group)
        except Exception:
            if self.error is None:
                raise  # otherwise the rank's own error says more
            failed = []
        if self.error is None:
            self.error = _error_of_others(failed) if failed else None
        if self.error is not None:
            setattr(self.error, KNOWN, True)
            try:
                raise self.error
            finally:
                self.error = None  # an error that is kept would keep all frames of the save

    def _ranks_failed(self, group: Any) -> list[str]:
        """Return in words which ranks have an error, and which."""
        import torch

        if not torch.distributed.is_initialized():
            return []
        somewhere = torch.tensor([self.error is not None], dtype=torch.int32, device=device_of(group))
        torch.distributed.all_reduce(somewhere, op=torch.distributed.ReduceOp.MAX, group=group)
        if not somewhere.item():
            return []
        here = None
        if self.error is not None:
            here = f"rank {torch.distributed.get_rank()} raised {_in_words(self.error)}"
        found: list[str | None] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, here, group=group)
        return [each for each in found if each]


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()


def _error_of_others(failed: list[str]) -> MegapatchError:
    return MegapatchError(
        f"the save failed on another rank: {'; '.join(failed)}. Expected every rank to finish its part. Take the "
        "checkpoint for incomplete, repair the cause, and save again into another folder. All ranks have left the "
        "save, and may continue to train"
    )


_finalizing: ContextVar[Failure | None] = ContextVar("_finalizing", default=None)
"""What keeps the error of work that rank 0 does alone, as long as all ranks finalize a checkpoint."""


# ------------------------------------------------------------------------------------------ the tensors
def finalize_together(save_state_dict_async_finalize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save_state_dict_async_finalize)
    def patched_save_state_dict_async_finalize(
        storage_writer: Any, global_metadata: Any, dist_wrapper: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_a(storage_writer, STORAGE) or not is_a(dist_wrapper, RANKS):
            return save_state_dict_async_finalize(storage_writer, global_metadata, dist_wrapper, *args, **kwargs)
        failure, result = Failure(), None
        finish = _keeping(storage_writer.finish, failure)
        retrieve = _returning_errors(storage_writer.retrieve_write_results)
        with temporarily_set(storage_writer, finish=finish, retrieve_write_results=retrieve), failure.kept():
            result = save_state_dict_async_finalize(storage_writer, global_metadata, dist_wrapper, *args, **kwargs)
        failure.raise_everywhere(dist_wrapper.group)
        return result

    return patched_save_state_dict_async_finalize


def _keeping(finish: Callable[..., Any], failure: Failure) -> Callable[..., Any]:
    """Return a function that keeps its error: after finish() the ranks meet once more."""

    @functools.wraps(finish)
    def kept_finish(*args: Any, **kwargs: Any) -> Any:
        with failure.kept():
            return finish(*args, **kwargs)

    return kept_finish


def _returning_errors(retrieve_write_results: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns its error: the ranks are about to gather the results, and look for errors."""

    @functools.wraps(retrieve_write_results)
    def kept_retrieve_write_results(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed.checkpoint.api import _wrap_exception

        try:
            return retrieve_write_results(*args, **kwargs)
        except Exception as error:
            return _wrap_exception(error)

    return kept_retrieve_write_results


# ------------------------------------------------------------------------------------------ the checkpoint
def save_together(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def patched_save(*args: Any, **kwargs: Any) -> Any:
        failure = Failure()
        with _kept_in(failure):
            request = save(*args, **kwargs)
        if request is None:
            failure.raise_everywhere()
        else:
            request.finalize_fns[:] = [_together(function) for function in request.finalize_fns]
        return request

    return patched_save


def _together(finalize: Callable[[], Any]) -> Callable[[], None]:
    """Return one of Megatron's own finalize functions, all of which return only when all ranks have come."""

    @functools.wraps(finalize)
    def finalize_together() -> None:
        failure = Failure()
        with _kept_in(failure):
            finalize()
        failure.raise_everywhere()

    return finalize_together


@contextlib.contextmanager
def _kept_in(failure: Failure) -> Iterator[None]:
    token = _finalizing.set(failure)
    try:
        yield
    finally:
        _finalizing.reset(token)


def keeping_error(write: Callable[..., Any]) -> Callable[..., Any]:
    """Let rank 0 keep the error of what it writes alone while ranks finalize, and write nothing more after it."""

    @functools.wraps(write)
    def patched_write(*args: Any, **kwargs: Any) -> Any:
        failure = _finalizing.get()
        if failure is None:
            return write(*args, **kwargs)
        with failure.kept():
            return write(*args, **kwargs) if failure.error is None else None

    return patched_write


# ------------------------------------------------------------------------------------------ the queue
def with_one_function(schedule_async_request: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule_async_request)
    def patched_schedule_async_request(self: Any, async_request: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(async_request, tuple) and hasattr(async_request, "finalize_fns"):
            async_request = _with_one_function(async_request)
        return schedule_async_request(self, async_request, *args, **kwargs)

    return patched_schedule_async_request


def in_one_function(execute_finalize_fns: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute_finalize_fns)
    def patched_execute_finalize_fns(
        self: Any, validate_matching_call_idx: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        # Without that validation ranks need not come here together.
        request = _with_one_function(self) if validate_matching_call_idx else self
        return execute_finalize_fns(request, validate_matching_call_idx, *args, **kwargs)

    return patched_execute_finalize_fns


def _with_one_function(request: Any) -> Any:
    """Return the request with one finalize function for all: ranks may have different numbers of them."""
    return request._replace(finalize_fns=[functools.partial(_finalize_all, request.finalize_fns)])


def _finalize_all(functions: Sequence[Callable[[], Any]]) -> None:
    failure = Failure()
    with failure.kept():
        for function in functions:
            function()
    failure.raise_everywhere()


PATCH = Patch(
    name="megatron.save-fails-everywhere",
    doc=__doc__,
    upstream=None,
    sites=(
        *(
            Site(
                f"{package}.state_dict_saver",
                diagnose_finalize,
                replace={"save_state_dict_async_finalize": finalize_together},
            )
            for package in (STRATEGIES, NVRX)
        ),
        Site(
            "megatron.core.dist_checkpointing.serialization",
            diagnose_checkpoint,
            replace={"save_config": keeping_error, "save": save_together},
        ),
        Site(
            "megatron.core.dist_checkpointing.validation",
            diagnose_manifest,
            replace={"save_integrity_manifest": keeping_error},
        ),
        Site(
            f"{STRATEGIES}.async_utils",
            diagnose_queue,
            replace={"AsyncCallsQueue.schedule_async_request": with_one_function},
        ),
        Site(f"{NVRX}.core", diagnose_request, replace={"AsyncRequest.execute_finalize_fns": in_one_function}),
    ),
)
