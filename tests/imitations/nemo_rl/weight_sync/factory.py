"""An imitation of NeMo-RL's module of this name, and of one of the transports that it knows."""

import contextlib

from .interfaces import WeightSynchronizer


def create_weight_synchronizer(policy, generation, generation_backend, colocated, **clusters):
    return CollectiveWeightSynchronizer(policy, generation)


class CollectiveWeightSynchronizer(WeightSynchronizer):
    is_stale = True
    mark_stale = init_communicator = shutdown = None

    def __init__(self, policy, generation):
        self._policy, self._generation = policy, generation

    def sync_weights(self, *, timer=None, kv_scales=None):
        label = "prepare_for_generation/transfer_and_update_weights"
        with timer.time(label) if timer else contextlib.nullcontext():
            self._policy.broadcast_weights_for_collective(kv_scales=kv_scales)
            if not all(self._generation.update_weights_from_collective()):
                raise RuntimeError("Weight transfer failed")
        self.is_stale = False
