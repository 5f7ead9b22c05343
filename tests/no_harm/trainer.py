"""A program's run on a rank: the models that it trains, and all that is recorded of it."""

from __future__ import annotations

import copy
import hashlib
import pickle
import threading
from pathlib import Path

import torch
from rigs.megatron import main_params
from way_back import streams
from way_back.checkpoints import Distributed
from way_back.pictures import parts_of, picture, take_logged

from megapatch.testing import mean_loss
from megapatch.testing._model import _gpt_of


class Run:
    """What a program gets: it builds models, and notes what it shows."""

    def __init__(self, layout, rank, folder):
        self.layout, self.rank, self.folder = layout, rank, folder
        self.trainers, self.found = [], {}

    def trainer(self, **options):
        """Build a model, with its optimizer and schedule, that the end of the program compares."""
        self.trainers.append(Trainer(self, options))
        return self.trainers[-1]

    def trained(self):
        """Build one that has made a step, and whose parameters are gathered."""
        trainer = self.trainer()
        trainer.train(0)
        trainer.model.gather_parameters()
        return trainer

    def note(self, kind, value):
        self.found[kind, f"{len(self.found)}"] = copy.deepcopy(value)

    def raising(self, function, *args, **kwargs):
        """Call a function that raises, as the program expects; note the exception."""
        try:
            function(*args, **kwargs)
        except BaseException as error:
            self.note("raised", f"{type(error).__name__}: {error}")
            return
        self.note("raised", "nothing")

    def in_thread(self, function, *args):
        """Call a function in a thread of its own, and return its result."""
        results = []
        thread = threading.Thread(target=lambda: results.append(function(*args)))
        thread.start()
        thread.join()
        return results[0]

    def outcome(self):
        """Return what the program has shown and left, by (kind, name)."""
        found = dict(self.found)
        for number, trainer in enumerate(self.trainers):
            found.update(
                {(kind, f"model {number}, {name}"): value for (kind, name), value in trainer.left().items()}
            )
        found.update({("random streams", name): state for name, state in streams.take().items()})
        return found


class Trainer:
    """A model with its optimizer and schedule, and what trainers do with them. `model` is a TinyGPT."""

    def __init__(self, run, options):
        self.run, self.layout, self.rank = run, run.layout, run.rank
        self.model = run.layout._replace(options={**run.layout.options, **options}).build()
        self.optimizer = self.model.optimizer
        self.schedule = run.layout.schedule_of(self.optimizer)
        self.disk = Distributed(self)

    def models(self):
        return [_gpt_of(chunk) for chunk in self.model.chunks]

    # ------------------------------------------------------------------------ steps
    def train(self, *steps):
        for data in steps:
            self.model.zero_grad()
            self.backward(data)
            self.update()

    def backward(self, data, **options):
        metrics = self.model.forward_backward(data, two_tuple=True, **options)
        self.run.note("loss", mean_loss(metrics))

    def update(self):
        succeeded, norm, _ = self.optimizer.step()
        self.run.note("gradient norm", (succeeded, norm))
        if succeeded:
            self.schedule.step(increment=1)

    def evaluate(self, data):
        for chunk in self.model.chunks:
            chunk.eval()
        with torch.no_grad():
            self.backward(data, forward_only=True)
        for chunk in self.model.chunks:
            chunk.train()

    # ------------------------------------------------------------------------ weights and state
    def weights(self):
        """Return copies of the model's state, by chunk, whole on each rank."""
        return main_params.weights(self.model)

    def load(self, weights, **options):
        for chunk, state in zip(self.model.chunks, weights, strict=True):
            chunk.load_state_dict(state, **options)

    def load_as_read(self, weights):
        """Load them as those of a checkpoint, which Megatron's load() has read."""
        main_params.restore_weights(self.model, weights)

    def parameters(self):
        return [parameter for chunk in self.model.chunks for parameter in chunk.parameters()]

    def optimizer_state(self):
        return main_params.optimizer_state(self.model), copy.deepcopy(self.schedule.state_dict())

    def load_optimizer(self, saved):
        main_params.load_optimizer(self.model, saved[0])

    # ------------------------------------------------------------------------ disk
    def save(self, name="saved"):
        """Write a distributed checkpoint; note its bytes, and return its path."""
        self.model.gather_parameters()
        path = self.disk.save(f"{self.run.folder}/{name}")
        self.note_files(path)
        return path

    def note_files(self, path):
        torch.distributed.barrier()
        self.run.note("checkpoint", files_of(path))

    def left(self):
        """Return what a step reads and leaves. Parameters as they are come first, before they are gathered."""
        raw = {}
        if not self.model.ddp_config.overlap_param_gather:  # or a gather may be under way
            for number, parameter in enumerate(self.parameters()):
                raw["parameters", str(number)] = parameter.detach().clone()
        logged = {key: value for key, value in take_logged().items() if value.any()}
        return {**raw, **picture(self), **logged}


def files_of(path):
    """Return a digest of each file of a checkpoint; of its metadata, of what they say."""
    found = {}
    for file in sorted(Path(path).iterdir()):
        content = file.read_bytes()
        if file.name == ".metadata":
            metadata = pickle.loads(content)
            content = repr((metadata.state_dict_metadata, metadata.storage_data)).encode()
        found[file.name] = hashlib.sha1(content).hexdigest()
    return found


def scaled(weights, factor):
    """Return other weights: a reference, an average, the policy of some steps ago."""
    return [
        {name: value * factor if is_weight(value) else value for name, value in state.items()} for state in weights
    ]


def is_weight(value):
    return torch.is_tensor(value) and value.is_floating_point()


__all__ = ["Run", "Trainer", "files_of", "is_weight", "parts_of", "scaled"]
