"""What a worker of NeMo-RL's data plane is called by in a train step in slices, with the names of NeMo-RL main.

Plain functions of an importable module: a worker class that Ray pickles by value takes them along by name.
"""

from __future__ import annotations

from typing import Any


def begin_train_step_presharded(self: Any, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
    self.begin_train_step(loss_fn=loss_fn, gbs=gbs, mbs=mbs)


def train_microbatch_presharded(self: Any, meta: Any) -> None:
    """Fetch this data-parallel rank's samples, and train on them."""
    data = self._attach_or_repack_pack_metadata(self._fetch(meta), meta)
    self.train_microbatch(data=data)


def finish_train_step_presharded(self: Any) -> dict[str, Any]:
    """What finish_train_step() tells, and whether its twins leave it to this worker to tell it."""
    result: dict[str, Any] = self.finish_train_step()
    return {**result, "is_replica_leader": bool(self._is_replica_leader())}


def abort_train_step_presharded(self: Any) -> None:
    self.abort_train_step()
