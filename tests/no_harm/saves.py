"""Programs of saves: distributed checkpoints at once, in the background, by turns, in part, interrupted."""

from __future__ import annotations

import io

import torch
from rigs.megatron.options import quick_writer
from way_back.checkpoints import Distributed

from .layouts import ON_DISKS
from .loads import TAKEN_OVER
from .table import program
from .trainer import scaled

AGREED = dict.fromkeys(("megatron.save-fails-everywhere", "megatron.save-plan-cache"), ("collectives",))
"""Ranks ask each other whether a save has failed, and whether the plan of the last one will do."""


@program("fp32", *ON_DISKS, "fp16", "bf16, sharded", "tp", "pp", "moe", "cp", changed=AGREED)
def saved_and_trained_on(run):
    trainer = run.trainer()
    trainer.train(0)
    trainer.save("first")
    trainer.train(1)
    trainer.save("second")


@program("fp32", "bf16", "tp", changed=AGREED)
def resumed_in_a_new_model(run):
    _resumed_in_a_new_model(run)


@program(
    *("bf16, sharded", "bf16, sharded, overlaps", "pp, vpp", "ep"),
    changed={**AGREED, "megatron.load-offloaded-state": (*TAKEN_OVER, "Adam's step")},
)
def resumed_in_a_new_model_from_buckets(run):
    _resumed_in_a_new_model(run)


def _resumed_in_a_new_model(run):
    first = run.trainer()
    first.train(0)
    path = first.save()
    second = run.trainer()
    second.train(999)  # gives a fresh optimizer state, as Transformer Engine's would have
    for _ in range(2):  # the second time in place of what has been trained on
        second.model.gather_parameters()
        read = second.disk.read(path)
        second.disk.load_weights(read)
        second.disk.load_optimizer(read)
        second.train(1)
    first.train(1)


@program("bf16", "bf16, sharded, overlaps", "pp", changed=AGREED)
def saved_in_the_background(run):
    trainer = run.trained()
    path = trainer.disk.begin(f"{run.folder}/saved")
    trainer.train(1)
    trainer.disk.finish()
    trainer.note_files(path)


@program("bf16", "bf16, sharded", changed=AGREED)
def saved_from_a_thread(run):
    trainer = run.trainer()
    trainer.train(0)
    run.in_thread(trainer.save)
    trainer.train(1)


@program("bf16", "bf16, sharded, overlaps", "ep", changed=AGREED)
def two_models_saved_by_turns(run):
    actor, critic = run.trainer(), run.trainer()
    for data in range(2):
        actor.train(data)
        actor.save(f"actor {data}")
        critic.train(data)
        critic.save(f"critic {data}")
        actor.load(critic.weights())
        actor.optimizer.reload_model_params()


@program("fp32", "bf16", "bf16, sharded", "bf16, sharded, overlaps", "cp")
def saved_by_the_first_rank(run):
    """By torch, on one rank of those that have the same weights, after a gather that all make."""
    trainer = run.trained()
    if run.rank == 0:
        file = io.BytesIO()
        torch.save([chunk.state_dict() for chunk in trainer.model.chunks], file)
        run.note("checkpoint", file.getvalue())
    trainer.train(1)


@program("bf16", "bf16, sharded, overlaps", changed=AGREED)
def a_save_interrupted_by_ctrl_c(run):
    trainer = run.trained()

    def stopped():
        trainer.disk.tree(loading=False)
        raise KeyboardInterrupt

    run.raising(stopped)
    trainer.train(1)
    trainer.save("again")


@program("bf16", "bf16, sharded, overlaps", changed={**AGREED, "megatron.own-save-results": ("checkpoint",)})
def a_save_given_up_and_the_next_one(run):
    """Written and never finished: the trainer has caught an exception and goes on with a queue of its own."""
    trainer = run.trained()
    trainer.disk.abandon(f"{run.folder}/abandoned")
    trainer.disk = Distributed(trainer)
    trainer.train(1)
    trainer.save("next")
    quick_writer()  # in this process saves would be mixed up from now on


@program("bf16", "bf16, sharded", "bf16, sharded, overlaps", "fp32, sharded, overlaps", changed=AGREED)
def the_first_rank_loads_and_broadcasts(run):
    trainer = run.trainer()
    saved = scaled(trainer.weights(), 0.5)
    trainer.train(0)
    if run.rank == 0:
        trainer.load(saved)
    for chunk in trainer.model.chunks:
        chunk.broadcast_params()
    trainer.optimizer.reload_model_params()
    trainer.disk.save(f"{run.folder}/saved")
    trainer.note_files(f"{run.folder}/saved")
    trainer.train(1)


@program("bf16", "bf16, sharded", changed={**AGREED, "megatron.main-params-after-load": TAKEN_OVER})
def weights_alone_from_a_checkpoint(run):
    trainer = run.trainer()
    trainer.train(0)
    path = trainer.save()
    trainer.train(1, 2)
    trainer.disk.load_weights(trainer.disk.read(path, weights_only=True))
    trainer.train(3)
