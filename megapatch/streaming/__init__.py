"""A controller that trains as rollouts arrive, and keeps weight versions in order.

    pump = TrainPump(StreamingConfig(generations_per_prompt=8), trainer, buffer, synchronizer, generation)
    await pump.run(num_steps=100)

`TrainPump` picks prompt groups by their staleness, trains on them one by one, and pushes the new weights.
`RolloutBuffer` holds rollouts that this process makes. A pump runs in one event loop of one process; its trainer,
buffer and generation may be elsewhere. `megapatch.streaming.nemo_rl`, `megapatch.streaming.skyrl` and
`megapatch.streaming.slime` have these parts for these frameworks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, EmptyStepError
from ._config import StreamingConfig
from ._groups import Group, Samples
from ._parts import Buffer, Generation, Logger, Synchronizer, Trainer
from ._pump import TrainPump
from ._rollout_buffer import RolloutBuffer
from ._trainers import RayTrainer, StepTrainer

if TYPE_CHECKING:
    from . import nemo_rl, skyrl, slime

__all__ = [
    "Buffer",
    "ConfigError",
    "EmptyStepError",
    "Generation",
    "Group",
    "Logger",
    "RayTrainer",
    "RolloutBuffer",
    "Samples",
    "StepTrainer",
    "StreamingConfig",
    "Synchronizer",
    "TrainPump",
    "Trainer",
    "nemo_rl",
    "skyrl",
    "slime",
]

_FRAMEWORKS = ("nemo_rl", "skyrl", "slime")


def __getattr__(name: str) -> Any:
    if name in _FRAMEWORKS:  # loaded on first use
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
