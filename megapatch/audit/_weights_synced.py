"""weights-synced: generation has received the trained weights, version by version.

Watches   each sync of TrainPump, if both sides have weights_digest(), and each sync of slime's and miles' actor,
          in all releases, which knows the trained weights from a copy. A sync that has sent another model, an
          older version or half of the tensors succeeds, rollouts bear the new version, and rewards drop. A
          trainer's own code calls compare_weights().
Limits    without a digest of the receiving side nothing is known: no inference engine offers one, so generation
          has to hash tensors as they arrive, before they are split or quantized.
Cost      reads the weights once on each side in a sync; slime's only where another model is loaded.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ..patch import Site
from ._audit import Part
from ._findings import Ledger, observes
from ._hashes import hash_of
from ._watching import before, site

DIGEST = "weights_digest"
_SYNC = "SyncedWeights._sync_and_stamp"
_UPDATE = "MegatronTrainRayActor.update_weights"


def weights_digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """Return a digest of named tensors, which depends on every bit, name, type and shape, and not on the order.

    Waits for a GPU once, at the end.

    Args:
        tensors: (name, tensor) pairs of any shapes; a generator's tensors are not kept.
    """
    import torch

    facts: list[str] = []
    hashes: list[Any] = []
    for name, tensor in tensors:
        facts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}")
        found = hash_of([tensor])
        hashes.append(found.to(hashes[0].device) if hashes else found)
    numbers = torch.stack(hashes).tolist() if hashes else []
    lines = sorted(f"{fact} {found}" for fact, found in zip(facts, numbers, strict=True))
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def are_equal(ledger: Ledger, trained: str, received: str | Iterable[str], version: int | None) -> bool:
    """Return whether all received digests are the trained one; report it if they are not."""
    all_received = [received] if isinstance(received, str) else list(received)
    ledger.judged["weights-synced"] += 1
    wrong = [digest for digest in all_received if digest != trained]
    if wrong:
        of = "" if version is None else f" of version {version}"
        are_many = len(all_received) > 1
        engines = f"{len(wrong)} of {len(all_received)} engines have" if are_many else "generation has"
        what = f"{engines} not received the weights{of} that were trained: {wrong[0]} instead of {trained}"
        ledger.report("weights-synced", "engines" if are_many else "generation", what)
    return not wrong


class WeightsSynced(Part):
    def sites(self) -> tuple[Site, ...]:
        return (
            site("megapatch.streaming._synced_weights", {_SYNC: self.watch_pump}, expected={_SYNC: ("version",)}),
            *(
                site(f"{framework}.backends.megatron_utils.actor", {_UPDATE: before(self._compare_with_copy)})
                for framework in ("slime", "miles")
            ),
        )

    # ------------------------------------------------------------------------ TrainPump
    def watch_pump(self, sync_and_stamp: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        @functools.wraps(sync_and_stamp)
        async def patched_sync_and_stamp(weights: Any, version: int) -> None:
            await sync_and_stamp(weights, version)
            try:
                await self._compare_sides(weights, version)
            except Exception:
                self.ledger.note_bug(WeightsSynced._compare_sides)

        return patched_sync_and_stamp

    async def _compare_sides(self, weights: Any, version: int) -> None:
        sides = (weights._synchronizer, weights._generation)
        if all(getattr(side, DIGEST, None) is not None for side in sides):
            trained, received = [await weights._calls(side, DIGEST) for side in sides]
            are_equal(self.ledger, trained, received, version)

    # ------------------------------------------------------------------------ slime
    @observes
    def _compare_with_copy(self, actor: Any, *_: Any, **__: Any) -> None:
        """Compare the weights that are sent with the copy of the actor's, where another model was loaded last."""
        self.ledger.happened("sync", type(actor).__name__)
        # Before there is a model, and where the copy itself is sent or loaded first, there is nothing to compare.
        loaded = getattr(actor, "_active_model_tag", "actor")
        if loaded == "actor" or actor.args.offload_train or actor.args.colocate:
            return
        backups = actor.weights_backuper
        self.ledger.judged["weights-synced"] += 1
        trained, sent = weights_digest(backups.get("actor").items()), weights_digest(backups._source_getter())
        if trained != sent:
            what = f"the weights of the model {loaded} are sent, not the actor's"
            self.ledger.report("weights-synced", "model", what)
