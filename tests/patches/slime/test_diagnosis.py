"""Verdicts on code that is like slime's and yet another, and what the patches look at on slime's modules."""

import pytest
from rigs.diagnosed_sources import each_source
from rigs.megatron.options import UNPATCHED
from rigs.renames import assert_renames_are_seen
from rigs.slime.train import find_slime

from megapatch.patches.slime import first_sync_pushes_actor, schedule_after_load, train_reentry

ACTOR = """
class MegatronTrainRayActor:
    def init(self):
        self.load_other_checkpoint("ref")
        {last}
    def update_weights(self): ...
    def load_other_checkpoint(self, tag):
        self.weights_backuper.backup(tag)
        self._active_model_tag = tag
    def _switch_model(self, target_tag):
        self.weights_backuper.restore(target_tag)
        self._active_model_tag = target_tag
"""
BEGIN = """
def initialize_model_and_optimizer(args):
    load_checkpoint()
    {after}
"""
TRAIN = """
def get_model_config(model): ...
def train(model):
    config = get_model_config(model)
    assert config.no_sync_func is None, "When overlap_grad_reduce is True, config.no_sync_func must be None"
    disable_forward_pre_hook(model)
def train_one_step(model, optimizer): ...
def save(model):
    disable_forward_pre_hook(model)
    enable_forward_pre_hook(model)
"""
SOURCES = {
    first_sync_pushes_actor.diagnose: {
        "actor: of the reference": (ACTOR.format(last="pass"), "needed", "that it loaded last"),
        "actor: switches": (ACTOR.format(last="self._switch_model('actor')"), "fixed", "always switches"),
    },
    schedule_after_load.diagnose: {
        "begin: steps": (BEGIN.format(after="args.scheduler.step(args.global_batch_size)"), "needed", "advances"),
        "begin: leaves it": (BEGIN.format(after="pass"), "fixed", "leaves the schedule"),
    },
    train_reentry.diagnose: {"train: as known": (TRAIN, "needed", "never clears")},
}
NAMES = {
    "actor: of the reference": "but ref tag",
    "begin: steps": "but scheduler",
    "train: as known": "but When overlap_grad_reduce",
}
test_the_verdict = each_source(SOURCES, NAMES)


@pytest.mark.every_patch("slime")
def test_a_renamed_name_is_not_taken_for_a_repair():
    assert_renames_are_seen("slime", at_least=20, setup=find_slime, env=UNPATCHED)
