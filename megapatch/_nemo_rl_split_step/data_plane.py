"""Entry points of a split train step for the workers of NeMo-RL's data plane, with the names of NeMo-RL main."""

from __future__ import annotations

from typing import Any


def begin_train_step_presharded(self: Any, loss_fn: Any, gbs: int | None = None, mbs: int | None = None) -> None:
    self.begin_train_step(loss_fn=loss_fn, gbs=gbs, mbs=mbs)


def train_microbatch_presharded(self: Any, meta: Any, last: bool = False) -> None:
    """Fetch this data-parallel rank's samples and train on them."""
    data = self._attach_or_repack_pack_metadata(self._fetch(meta), meta)
    self.train_microbatch(data=data, **({"last": True} if last else {}))  # NeMo-RL's own does not take it


def finish_train_step_presharded(self: Any) -> dict[str, Any]:
    """Return the result of finish_train_step(), and whether this worker is the one that speaks for its twins."""
    result: dict[str, Any] = self.finish_train_step()
    return {**result, "is_replica_leader": bool(self._is_replica_leader())}


def abort_train_step_presharded(self: Any) -> None:
    self.abort_train_step()
