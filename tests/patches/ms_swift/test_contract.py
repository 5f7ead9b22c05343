"""ms-swift's patches keep the contract on its own code: the newest release."""

import math

import pytest
from rigs.contract import check_family
from rigs.ms_swift.trainer import GRADS, RELEASES, find_swift, needs_swift, train, trainer_of

from megapatch.patches._catalogue import of_family
from megapatch.patches.ms_swift import overflow_is_skipped, train_reentry

pytestmark = needs_swift


def skipped_step():
    trainer = trainer_of(dtype="fp16")
    trainer.setup_model_training()
    train(trainer, 0)
    assert trainer._train_metrics["grad_norm"] == math.inf
    assert trainer.opt_param_scheduler.num_steps == 0


def second_setup():
    trainer = trainer_of(overlap=GRADS)
    trainer.setup_model_training()
    trainer.setup_model_training()


SCENARIOS = {overflow_is_skipped.PATCH: skipped_step, train_reentry.PATCH: second_setup}


@pytest.mark.every_patch("ms_swift")
def test_the_contract_is_kept():
    check_family(of_family("ms_swift"), SCENARIOS, find_swift, SWIFT_RELEASE=RELEASES[-1].folder)
