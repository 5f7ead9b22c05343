"""Readers of a model of verl's engine after a step: exports, copies and checkpoints."""

import contextlib
import functools
import importlib
import sys
import tempfile
from types import SimpleNamespace
from unittest import mock

import torch

from megapatch import apply, restore
from megapatch._python.dotted import temporarily_set
from rigs.megatron.exporters import installed
from rigs.megatron.gathers import Collectives, whole, wrong
from rigs.verl.engine import BOTH, ENGINE, GRADS, STEPS, batch_of, engine_of, loss, train


def read_after_steps():
    """Return, without the patches and with them, by reader: the fraction of the elements that is old, by step; and
    the gathers of the model in these steps and in one forward pass after them."""
    found = {}
    readers = {name: read for name, (read, there) in READS.items() if there()}
    for name, switch in (("without", restore), ("with", apply)):
        switch()
        step_by_lr = {"adam_eps": 1e-8}  # a step that changes every element, in bf16 too
        engine = engine_of(overlap=BOTH, optimizer=step_by_lr)
        plain = engine_of(overlap=GRADS, optimizer=step_by_lr, colocated=True)
        for reader, read in readers.items():
            fractions, gathers = [], Collectives()
            for step in range(STEPS):
                train(plain, step)
                expected = read(plain)
                with gathers.counted():
                    train(engine, step)
                    fractions.append(wrong(read(engine), expected))
            with gathers.counted(), engine.eval_mode():
                engine.infer_batch(batch_of(0), loss())
            found[name, reader] = fractions, gathers.gathers
    return found


def export(engine):
    """The engine's own export, through Megatron-Bridge's own exporter."""
    tensors, _ = engine.get_per_tensor_param()
    return {name: tensor.clone() for name, tensor in tensors}


def shards(engine):
    """The engine's own export of shards; Bridge's description of the model is ours."""
    index = [
        SimpleNamespace(megatron_name=name, param=parameter, spec=None)
        for name, parameter in engine.module[0].named_parameters()
    ]
    with mock.patch.object(type(engine), "_mcore_export_index", return_value=index, create=True):
        return {name: shard.clone() for name, shard, _ in engine.get_per_tensor_param_shard()[0]}


def copy(engine):
    state = importlib.import_module("verl.utils.megatron_utils").copy_megatron_model_to_cpu(engine.module)
    (chunk,) = state.values()
    buffers = [buffer["param_data"] for group in chunk["buffer_states"] for buffer in group]
    return dict(enumerate(buffers))


class _Written(Exception):
    """Raised in place of writing: what follows it in a save would write configurations."""


def save(engine):
    """The engine's own save_checkpoint() with Megatron's shards, up to what is given to Megatron to write."""
    manager, found = engine.checkpoint_mananager, {}
    manager.use_dist_checkpointing, manager.checkpoint_save_contents = True, ["model"]

    def write(sharded_state_dict, **ignored):
        found.update(whole(sharded_state_dict["model"]))
        raise _Written

    module = importlib.import_module("verl.utils.checkpoint.megatron_checkpoint_manager")
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(module, "save_dist_checkpointing", write),
        contextlib.suppress(_Written),
    ):
        engine.save_checkpoint(folder)
    return found


def load_schedule(manager, steps):
    """The manager's own load_checkpoint() of an empty optimizer, whose schedule is at this many steps."""
    read = {"optimizer": {}, "lr_scheduler": {**manager.lr_scheduler.state_dict(), "num_steps": steps}}
    contents = {"optimizer": mock.MagicMock(), "checkpoint_load_contents": ["optimizer"]}
    with tempfile.TemporaryDirectory() as folder, temporarily_set(manager, **contents):
        load_checkpoint(manager, read, folder)


def load_checkpoint(manager, read, folder):
    """The manager's own load_checkpoint(), which finds what was read in the folder."""
    module = importlib.import_module("verl.utils.checkpoint.megatron_checkpoint_manager")
    checkpointing = importlib.import_module("megatron.core.dist_checkpointing")
    with (
        mock.patch.object(module, "load_dist_checkpointing", return_value=read),
        mock.patch.object(checkpointing, "load_content_metadata", return_value={}, create=True),
        mock.patch.object(torch.serialization, "add_safe_globals"),
        mock.patch.dict(sys.modules, transformer_engine=mock.MagicMock()),  # 0.6.1 names its optimizer
    ):
        manager.load_checkpoint(folder)


def always():
    return True


def _has_shards():
    return hasattr(importlib.import_module(ENGINE).MegatronEngine, "get_per_tensor_param_shard")


READS = {
    "export": (export, functools.partial(installed, "Megatron-Bridge")),
    "shards": (shards, _has_shards),
    "copy": (copy, always),
    "save": (save, always),
}
"""By name: what reads a model, and whether it can be called here."""
