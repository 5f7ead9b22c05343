"""An fp16 overflow that a framework survives: how often that was, and what is said of it."""

from types import SimpleNamespace

import pytest
import torch

from megapatch.patches._overflow import COUNT, count_overflow


class Optimizer:
    def __init__(self, scale=4.0, least=1.0):
        self.scale, self.config = scale, SimpleNamespace(min_loss_scale=least)

    def get_loss_scale(self):
        return torch.tensor(self.scale)


@pytest.mark.parametrize(
    ("scale", "level", "words"),
    [
        (2.0, "WARNING", "the loss scale is now 2 (2 so far)"),
        (
            1.0,
            "ERROR",
            "overflow at the smallest loss scale, 1: the optimizer step was skipped, and so will be all",
        ),
    ],
)
def test_skipped_steps_are_counted_and_told(caplog, scale, level, words):
    trainer = SimpleNamespace(optimizer=Optimizer(scale))
    for _ in range(2):
        count_overflow(trainer)
    assert getattr(trainer, COUNT) == 2
    assert [record.levelname for record in caplog.records] == [level] * 2
    assert words in caplog.records[1].getMessage()


def test_without_a_smallest_loss_scale_there_is_always_a_smaller_one(caplog):
    count_overflow(SimpleNamespace(optimizer=Optimizer(scale=0.5, least=None)))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
