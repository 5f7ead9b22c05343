"""weights-synced: the weights that generation receives are those that were trained.

Watches   each sync of slime's and miles' actor, in all releases, which knows the trained weights from a copy. One
          that has sent another model succeeds, rollouts bear the new version, and rewards drop.
Limits    the sending side only: no inference engine says which weights it has received.
Cost      reads the weights twice in a sync for which another model is loaded; nothing in others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..patch import Site
from ._audit import Part
from ._findings import observes
from ._hashes import hash_of
from ._watching import before, site

_UPDATE = "MegatronTrainRayActor.update_weights"


class WeightsSynced(Part):
    def sites(self) -> tuple[Site, ...]:
        return tuple(
            site(f"{framework}.backends.megatron_utils.actor", {_UPDATE: before(self._compare_with_copy)})
            for framework in ("slime", "miles")
        )

    @observes
    def _compare_with_copy(self, actor: Any, *_: Any, **__: Any) -> None:
        """Compare the weights that are sent with the copy of the actor's, where another model was loaded last."""
        # Before there is a model, and where the copy itself is sent or loaded first, there is nothing to compare.
        loaded = getattr(actor, "_active_model_tag", "actor")
        if loaded == "actor" or actor.args.offload_train or actor.args.colocate:
            return
        backups = actor.weights_backuper
        self.ledger.judged["weights-synced"] += 1
        if _hashes(backups.get("actor").items()) != _hashes(backups._source_getter()):
            what = f"the weights of the model {loaded} are sent, not the actor's"
            self.ledger.report("weights-synced", "model", what)


def _hashes(tensors: Iterable[tuple[str, Any]]) -> dict[str, list[int]]:
    """Return by name a hash of each tensor; waits for a GPU once, at the end."""
    hashes = {name: hash_of([tensor]) for name, tensor in tensors}
    return {name: found.tolist() for name, found in hashes.items()}
