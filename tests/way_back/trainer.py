"""A model with its optimizer, schedule and checkpoints on a rank, and the operations on it."""

from __future__ import annotations

import functools
import itertools

import torch
from rigs.megatron.options import Interrupted, linear_schedule

from megapatch.testing import init_parallel, mean_loss, tiny_gpt
from megapatch.testing._data import forward_step
from megapatch.testing._model import _gpt_of
from megapatch.train_step import TrainStep

from .checkpoints import checkpoints_of
from .faults import raising
from .pictures import parts_of, picture, take_logged
from .plan import ABORTS, Step, WeightsOf

MEAN = functools.partial(forward_step, two_tuple=True)
LAST = (900, 901)  # the data of the two steps after a sequence
_files = itertools.count()


def overflowing(data, model):
    """Megatron's forward step, with a loss that is infinite."""
    output, usual = MEAN(data, model)

    def loss_function(output):
        loss, metrics = usual(output)
        return loss * float("inf"), metrics

    return output, loss_function


class Trainer:
    """A trainer's state of one model, in a layout that is set up."""

    def __init__(self, layout, rank, folder):
        self.layout, self.rank, self.folder = layout, rank, folder
        self.slots, self.pending = [], None
        self.build()

    def build(self):
        self.model = self.layout.build()
        rate = self.layout.options["lr"]
        self.schedule = linear_schedule(self.model.optimizer, steps=40, max_lr=rate, start_wd=0.01, end_wd=0.1)
        self.checkpoints = checkpoints_of(self)
        take_logged()

    def models(self):
        return [_gpt_of(chunk) for chunk in self.model.chunks]

    def path(self):
        """Return a path that is new, and the same on all ranks."""
        return f"{self.folder}/{next(_files)}"

    # ------------------------------------------------------------------------ steps
    def step(self, data, kind="step"):
        """Do a step of any kind; return what it shows, by (kind, name)."""
        self.train_mode()
        if kind == "split step":
            self.split(data)
            return {}
        self.model.zero_grad()
        metrics = self.forward_backward(data, overflowing if kind == "step that overflows" else MEAN)
        succeeded, norm, _ = self.model.optimizer.step()
        if succeeded:
            self.schedule.step(increment=1)
        return {
            ("loss", str(data)): mean_loss(metrics),
            ("gradient norm", str(data)): float(norm if norm is not None else -1.0),
            ("succeeded", str(data)): float(succeeded),
            **{(kind, f"{name} {data}"): value for (kind, name), value in take_logged().items()},
        }

    def split(self, data, fault=None):
        step = TrainStep(self.model.chunks, self.model.optimizer, self.schedule)
        with step:
            size = self.layout.parallel.get("pp", 1)  # the fewest that virtual stages take
            batches = self.model.microbatches(data, 2 * size)
            for call in (batches[:size], batches[size:]):
                step.forward_backward(**self.arguments(call, MEAN))
            if fault == "dropped":
                step.abort()
                return
            step.finish(increment=1)
        take_logged()  # of all calls: a trainer logs it once a step

    def arguments(self, batches, function):
        iterators = [iter(batches) for _ in self.model.chunks]
        return {
            "forward_step_func": function,
            "data_iterator": iterators if len(iterators) > 1 else iterators[0],
            "num_microbatches": len(batches),
            "seq_length": self.model.seq,
            "micro_batch_size": 2,
        }

    def forward_backward(self, data, function=MEAN, forward_only=False):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()(
            model=self.model.chunks,
            forward_only=forward_only,
            **self.arguments(self.model.microbatches(data, 2), function),
        )

    def train_mode(self):
        """As Megatron's train() does before its first step, and after an evaluation."""
        for chunk in self.model.chunks:
            chunk.train()

    # ------------------------------------------------------------------------ what leaves nothing
    def abort(self, data, way, place):
        self.train_mode()
        try:
            if way == "abort":
                with raising(self.model, place):
                    self.model.zero_grad()
                    self.forward_backward(data)
                    self.model.optimizer.step()
            else:
                with raising(self.model, place):
                    self.split(data)
        except Interrupted:
            return
        raise AssertionError(f"nothing was raised {place}")

    def evaluate(self, data, raise_in=None):
        """As Megatron's evaluate(), which leaves the model in evaluation mode when it raises."""
        for chunk in self.model.chunks:
            chunk.eval()
        with torch.no_grad():
            if raise_in is None:
                self.forward_backward(data, forward_only=True)
                self.train_mode()
                return
            try:
                with raising(self.model, raise_in):
                    self.forward_backward(data, forward_only=True)
            except Interrupted:
                return
        raise AssertionError("nothing was raised")

    def log_probabilities(self, data):
        with torch.no_grad():
            self.forward_backward(data, forward_only=True)

    def swap(self, data):
        """Compute log probabilities of a reference: its weights come into the model, and go again."""
        self.model.gather_parameters()
        models = self.models()
        mine = [{name: value.clone() for name, value in _weights(gpt).items()} for gpt in models]
        for gpt, weights in zip(models, mine, strict=True):
            gpt.load_state_dict({name: value * 0.5 for name, value in weights.items()}, strict=False)
        self.log_probabilities(data)
        for gpt, weights in zip(models, mine, strict=True):
            gpt.load_state_dict(weights, strict=False)

    def offload(self):
        """Move the optimizer's state and the gradients away and back, as far as this Megatron can."""
        optimizer = self.model.optimizer
        if hasattr(optimizer, "offload_to_cpu"):
            optimizer.offload_to_cpu()
            optimizer.restore_from_cpu()
        for chunk in self.model.chunks:
            if hasattr(chunk, "offload_grad_buffers"):
                chunk.offload_grad_buffers()
                chunk.restore_grad_buffers()

    def another_model(self, data):
        """Train another model in the same layout for a step, such as a critic, and let it go."""
        other = self.layout.build()
        other.train_step(data, two_tuple=True)
        take_logged()

    # ------------------------------------------------------------------------ loads
    def load(self, slot, parts=("weights", "optimizer", "schedule")):
        weights_only = tuple(parts) == ("weights",)
        if not weights_only:
            self.make_loadable()
        self.model.gather_parameters()
        read = self.checkpoints.read(slot, weights_only)
        for part in parts:
            getattr(self.checkpoints, f"load_{part}")(read)

    def load_that_raises(self, slot):
        """Raise when the weights are loaded, and the optimizer is not."""
        self.make_loadable()
        self.model.gather_parameters()
        self.checkpoints.load_weights(self.checkpoints.read(slot))

    def make_loadable(self):
        """Give a fresh optimizer state. Without Transformer Engine Megatron takes no other apart."""
        if self.layout.is_sharded and not any(part.optimizer.state for part in parts_of(self.model.optimizer)):
            self.model.train_step(999, two_tuple=True)
            take_logged()

    # ------------------------------------------------------------------------ the reference
    def do(self, program):
        """Do what counts, without any load and without any state dict."""
        for item in program:
            if isinstance(item, WeightsOf):
                self.set_weights(item.program)
            else:
                assert isinstance(item, Step)
                self.set_rate(item.rate)
                self.step(item.data, item.kind)

    def set_weights(self, program):
        other = Trainer(self.layout, self.rank, self.folder)
        other.do(program)
        other.model.gather_parameters()
        self.model.gather_parameters()
        for mine, theirs in zip(self.models(), other.models(), strict=True):
            mine.load_state_dict(_weights(theirs), strict=False)
        self.model.optimizer.reload_model_params()

    def set_rate(self, steps):
        self.schedule.num_steps = steps
        self.schedule.step(increment=0)

    def last_steps(self):
        """Do two more steps; return what they show and leave, by (kind, name)."""
        shown = {}
        for data in LAST:
            shown.update(self.step(data))
        return {**shown, **picture(self)}


def _weights(gpt):
    return {name: value for name, value in gpt.state_dict().items() if torch.is_tensor(value)}


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


SIMPLE = {
    "step": Trainer.step,
    "split step": lambda trainer, data: trainer.step(data, "split step"),
    "step that overflows": lambda trainer, data: trainer.step(data, "step that overflows"),
    "evaluation": Trainer.evaluate,
    "evaluation that raises": lambda trainer, data: trainer.evaluate(data, "in the forward pass"),
    "log probabilities": Trainer.log_probabilities,
    "swap of a reference": Trainer.swap,
    "offload and onload": lambda trainer, data: trainer.offload(),
    "second model": Trainer.another_model,
    "TrainStep dropped": lambda trainer, data: trainer.split(data, "dropped"),
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
        trainer.slots[-1], ("optimizer", "weights", "schedule")
    ),
    "new model": _new_model,
    "another layout and back": _another_layout,
}
