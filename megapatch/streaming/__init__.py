"""A controller that trains as rollouts arrive, and keeps weight versions in order.

    pump = TrainPump(StreamingConfig(generations_per_prompt=8), trainer, buffer, synchronizer, generation)
    await pump.run(num_steps=100)

`TrainPump` picks prompt groups by their staleness (`StalenessSampler`), trains on them one by one, and pushes the
new weights; `RolloutBuffer` is a buffer for rollouts of the same process. For one event loop, in one process;
trainer, buffer and generation may be elsewhere.
"""

from .buffer import Buffer, RolloutBuffer
from .config import ConfigError, StreamingConfig
from .errors import EmptyStepError
from .pump import TrainPump
from .sampler import Backlog, Group, StalenessSampler
from .step_trainer import StepTrainer
from .trainer import Trainer

__all__ = [
    "Backlog",
    "Buffer",
    "ConfigError",
    "EmptyStepError",
    "Group",
    "RolloutBuffer",
    "StalenessSampler",
    "StepTrainer",
    "StreamingConfig",
    "TrainPump",
    "Trainer",
]
