"""An imitation of NeMo-RL's module of this name."""

from abc import ABC, abstractmethod


class WeightSynchronizer(ABC):
    @abstractmethod
    def sync_weights(self, *, timer=None, kv_scales=None):
        """Bring the policy's weights to the generation."""

    @property
    @abstractmethod
    def is_stale(self): ...

    @abstractmethod
    def mark_stale(self): ...

    @abstractmethod
    def init_communicator(self): ...

    @abstractmethod
    def shutdown(self): ...
