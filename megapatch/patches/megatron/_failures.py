"""An error that some ranks have in the work of all becomes an error on all of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..._mcore.devices import device_of
from ..._troubleshooting import see
from ...errors import MegapatchError

KNOWN = "_megapatch_all_ranks_know"
"""Attribute of an error that has been raised on all ranks: built-in exceptions take no weak references."""

_logger = logging.getLogger("megapatch")


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

    def _ranks_failed(self, group: Any) -> list[_Failed]:
        import torch

        if not torch.distributed.is_initialized():
            return []
        somewhere = torch.tensor([self.error is not None], dtype=torch.int32, device=device_of(group))
        torch.distributed.all_reduce(somewhere, op=torch.distributed.ReduceOp.MAX, group=group)
        if not somewhere.item():
            return []
        here = None
        if self.error is not None:
            rank = torch.distributed.get_rank()
            here = _Failed(rank, _in_words(self.error), isinstance(self.error, Exception))
        found: list[_Failed | None] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, here, group=group)
        return [each for each in found if each]


class _Failed(NamedTuple):
    """A rank's error, as others learn of it."""

    rank: int
    text: str
    is_exception: bool


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()


def _error_of_others(failed: list[_Failed]) -> BaseException:
    """Return an error that an `except Exception` catches here exactly if it does on the first rank that failed."""
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    ranks = "; ".join(f"rank {each.rank} raised {each.text}" for each in failed)
    error = MegapatchError(
        f"the save failed on another rank: {ranks}. Expected every rank to finish its part. Take the checkpoint "
        "for incomplete, repair the cause, and save again into another folder. All ranks have left the save, and "
        "may continue to train"
    )
    if failed[0].is_exception:
        return error
    together: BaseException = CheckpointException("write", {failed[0].rank: _wrap_exception(error)})
    return together
