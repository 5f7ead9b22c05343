"""The operations on a trainer, by their names."""

from __future__ import annotations

import torch

from megapatch.testing import init_parallel, tiny_gpt

from .plan import ABORTS, ASIDE, COMPANION, GENERATION, INFERENCE, LAST, REDUCED, REFUSED, TRAIN
from .trainer import Trainer


def operate(trainer, operation, data):
    """Do the operation of a sequence."""
    if (run := SIMPLE.get(operation)) is not None:
        return run(trainer, data)
    way = "TrainStep aborted" if operation.startswith("TrainStep") else "abort"
    return trainer.abort(data, way, next(place for place in ABORTS if operation.endswith(place)))


def _async_save(trainer, data):
    trainer.pending = trainer.checkpoints.begin(trainer.path())


def _finish(trainer, data):
    trainer.checkpoints.finish()
    trainer.slots.append(trainer.pending)
    trainer.pending = None


def _save(trainer, data):
    trainer.model.gather_parameters()
    trainer.slots.append(trainer.checkpoints.save(trainer.path()))


def _load_after_one_that_raised(trainer, data):
    trainer.load_that_raises(trainer.slots[-1])
    trainer.load(trainer.slots[-1])


def _new_model(trainer, data):
    trainer.layout.set_up()
    trainer.build()


def _another_layout(trainer, data):
    init_parallel(**({} if trainer.layout.parallel else {"pp": 2}))
    other = tiny_gpt()
    other.train_step(data, two_tuple=True)
    _new_model(trainer, data)


def _companion_loads(trainer, data):
    other = trainer.companion()
    other.step(data)
    _save(other, data)
    other.step(data)
    other.load(other.slots.pop())


SIMPLE = {
    "step": Trainer.step,
    "split step": lambda trainer, data: trainer.step(data, "split step"),
    "step that overflows": lambda trainer, data: trainer.step(data, "step that overflows"),
    TRAIN: lambda trainer, data: trainer.step(data, TRAIN),
    f"{TRAIN} that raises": Trainer.train_and_raise,
    "evaluation": Trainer.evaluate,
    "evaluation that raises": lambda trainer, data: trainer.evaluate(data, "in the forward pass"),
    "log probabilities": Trainer.log_probabilities,
    INFERENCE: lambda trainer, data: trainer.log_probabilities(data, torch.inference_mode),
    GENERATION: Trainer.generate,
    COMPANION[0]: lambda trainer, data: trainer.companion().step(data),
    COMPANION[1]: lambda trainer, data: trainer.companion().evaluate(data),
    COMPANION[2]: _companion_loads,
    COMPANION[3]: lambda trainer, data: trainer.let_companion_go(),
    "swap of a reference": Trainer.swap,
    "offload and onload": lambda trainer, data: trainer.offload(),
    "second model": Trainer.another_model,
    "TrainStep dropped": lambda trainer, data: trainer.split(data, "dropped"),
    REDUCED: Trainer.reduce_and_raise,
    ASIDE: Trainer.set_aside,
    LAST: lambda trainer, data: trainer.split(data, "dropped", last=True),
    REFUSED: Trainer.refuse_load,
    "save": _save,
    "save that raises": lambda trainer, data: trainer.checkpoints.save_that_raises(trainer.path()),
    "async save": _async_save,
    "finish the async save": _finish,
    "abandoned async save": lambda trainer, data: trainer.checkpoints.abandon(trainer.path()),
    "load": lambda trainer, data: trainer.load(trainer.slots[-1]),
    "load of the first save": lambda trainer, data: trainer.load(trainer.slots[0]),
    "load without the schedule": lambda trainer, data: trainer.load(trainer.slots[-1], ("weights", "optimizer")),
    "load that raises, then load": _load_after_one_that_raised,
    "load of the weights": lambda trainer, data: trainer.load(trainer.slots[-1], ("weights",)),
    "load of the optimizer, then of the weights": lambda trainer, data: trainer.load(
        trainer.slots[-1], ("optimizer", "weights", "schedule", "streams")
    ),
    "load of the optimizer": lambda trainer, data: trainer.load(trainer.slots[-1], ("optimizer",)),
    "new model": _new_model,
    "another layout and back": _another_layout,
}
