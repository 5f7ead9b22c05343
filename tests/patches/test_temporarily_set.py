"""Attributes that patches set for a while are gone afterwards, also after an exception. Needs no torch."""

import contextlib
from types import SimpleNamespace

import pytest

from megapatch._python.dotted import temporarily_set
from megapatch.patches import _overflow
from megapatch.patches._overflow import OVERFLOW, overflow_answered


class Optimizer:
    """Has step() from its class, as Megatron's have."""

    found = OVERFLOW

    def step(self):
        if self.found is None:
            raise ZeroDivisionError
        return self.found


@pytest.mark.parametrize("raising", [False, True])
def test_an_object_has_its_own_attributes_again_or_its_classs(raising):
    target = Optimizer()
    target.lr = own = object()
    with contextlib.suppress(ZeroDivisionError), temporarily_set(target, lr=1, step=2, found=3):
        assert vars(target) == {"lr": 1, "step": 2, "found": 3}
        if raising:
            raise ZeroDivisionError
    assert vars(target) == {"lr": own}


def test_what_others_have_set_meanwhile_stays():
    target = Optimizer()
    target.lr = target.wd = 0
    with temporarily_set(target, lr=1, wd=None, step=2, found=3):
        target.lr, target.step = 4, 5
        del target.wd
    assert vars(target) == {"lr": 4, "step": 5}


@pytest.mark.parametrize(
    ("found", "answer", "count"),
    [
        (OVERFLOW, "answer", 1),
        ((True, 1.0, None), (True, 1.0, None), 0),
        ((False, 1.0, None), (False, 1.0, None), 0),
    ],
)
def test_an_overflow_is_answered_and_counted_and_any_other_result_is_not(found, answer, count, monkeypatch):
    monkeypatch.setattr(_overflow, "count_overflow", (counted := []).append)
    optimizer = Optimizer()
    optimizer.found = found
    trainer = SimpleNamespace(optimizer=optimizer)
    with overflow_answered(trainer, "answer") as overflows:
        assert optimizer.step() == answer
    assert overflows == [OVERFLOW] * count
    assert counted == [trainer] * count
    assert "step" not in vars(optimizer)


def test_a_step_that_raises_leaves_the_optimizer_its_own_and_counts_nothing(monkeypatch):
    monkeypatch.setattr(_overflow, "count_overflow", (counted := []).append)
    trainer = SimpleNamespace(optimizer=Optimizer())
    with contextlib.suppress(ZeroDivisionError), overflow_answered(trainer, "answer") as overflows:
        assert trainer.optimizer.step() == "answer"
        trainer.optimizer.found = None
        trainer.optimizer.step()
    assert overflows == [OVERFLOW] and counted == []
    assert "step" not in vars(trainer.optimizer)
