"""Saving and loading: state dicts, or Megatron's distributed checkpoints."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
from unittest import mock

import torch
from rigs.megatron.options import Interrupted, attempt
from rigs.megatron.save import strategies

from megapatch._verify.checks.loads import read_back

from . import streams
from .faults import raises
from .layouts import ON_DISK


def checkpoints_of(trainer):
    return (Distributed if trainer.layout.is_on_disk else StateDicts)(trainer)


class StateDicts:
    """Saves in memory, as torch.save would write them; weights are read by Megatron's load(), from a file."""

    def __init__(self, trainer):
        self.trainer = trainer

    def save(self, path):
        trainer = self.trainer
        saved = copy.deepcopy(
            {
                "model": [chunk.state_dict() for chunk in trainer.model.chunks],
                "optimizer": trainer.model.optimizer.state_dict(),
                "schedule": trainer.schedule.state_dict(),
                "streams": streams.take(),
            }
        )
        return saved

    def save_that_raises(self, path):
        with mock.patch.object(self.trainer.schedule, "state_dict", raises):
            error, _ = attempt(self.save, path)
        assert error == Interrupted.__name__

    def read(self, slot, weights_only=False):
        return {**slot, "model": read_back({"model": slot["model"]})["model"]}

    def load_weights(self, read):
        for chunk, state in zip(self.trainer.model.chunks, read["model"], strict=True):
            chunk.load_state_dict(state)

    def load_optimizer(self, read):
        self.trainer.model.optimizer.load_state_dict(copy.deepcopy(read["optimizer"]))

    def load_schedule(self, read):
        self.trainer.schedule.load_state_dict(copy.deepcopy(read["schedule"]))

    def load_streams(self, read):
        streams.put(read["streams"])


class Distributed:
    """Saves on disk by dist_checkpointing, with one strategy for all, as Megatron's trainer keeps it."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.strategy = strategies("torch").TorchDistSaveShardedStrategy(
            "torch_dist", 1, thread_count=1, cached_metadata=True
        )
        self.calls = None  # those of asynchronous saves

    def tree(self, loading, weights_only=False):
        trainer = self.trainer
        sharded = {f"model{index}": gpt.sharded_state_dict() for index, gpt in enumerate(trainer.models())}
        if weights_only:
            return sharded
        how = {} if trainer.layout.saved == ON_DISK else {"distrib_optim_sharding_type": trainer.layout.saved}
        optimizer = trainer.model.optimizer.sharded_state_dict(
            dict(sharded),
            is_loading=loading,
            **({"metadata": how} if how else {}),
        )
        return {**sharded, "optimizer": optimizer, "schedule": trainer.schedule.state_dict()}

    def save(self, path):
        self._save(path, at_once=True)
        return path

    def save_that_raises(self, path):
        """Raise on all ranks, before anything is written."""
        with mock.patch.object(strategies("filesystem_async").FileSystemWriterAsync, "prepare_write_data", raises):
            error, _ = attempt(self._save, path, at_once=True)
        assert error, "the save has not raised"

    def _save(self, path, at_once, weights_only=False):
        from megatron.core import dist_checkpointing

        if self.trainer.rank == 0:
            os.makedirs(path)
        torch.distributed.barrier()
        arguments = {"async_sharded_save": not at_once, "validate_access_integrity": False}
        if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
            arguments["async_strategy"] = "mcore"
        return dist_checkpointing.save(self.tree(False, weights_only), path, self.strategy, **arguments)

    def begin(self, path):
        """Begin an asynchronous save: a process of its own writes."""
        module = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils")
        self.calls = module.AsyncCallsQueue()
        self.calls.schedule_async_request(self._save(path, at_once=False))
        return path

    def finish(self):
        self.calls.maybe_finalize_async_calls(blocking=True)
        self.calls = None

    def abandon(self, path):
        """Write the weights, and never finalize: the trainer has caught an exception and begun again."""
        request = self._save(path, at_once=False, weights_only=True)
        if request.async_fn is not None:  # this rank has something to write
            arguments = list(request.async_fn_args)
            if getattr(request, "preload_fn", None) is not None:
                arguments[1] = request.preload_fn()
            request.async_fn(*arguments, **(getattr(request, "async_fn_kwargs", None) or {}))
        torch.distributed.barrier()

    def read(self, path, weights_only=False):
        from megatron.core import dist_checkpointing

        return dist_checkpointing.load(self.tree(True, weights_only), path)

    def load_weights(self, read):
        for index, gpt in enumerate(self.trainer.models()):
            gpt.load_state_dict(read[f"model{index}"], strict=False)  # strictly, it asks for Transformer Engine's

    def load_optimizer(self, read):
        self.trainer.model.optimizer.load_state_dict(read["optimizer"])

    def load_schedule(self, read):
        self.trainer.schedule.load_state_dict(read["schedule"])

    def load_streams(self, read):
        """Do nothing: no layout on disk draws random numbers."""
