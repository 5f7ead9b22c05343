"""rigs.cells: one failing cell of a job fails in its own test, with its own traceback, and in no other."""

from __future__ import annotations

import pytest
import torch
from rigs.cells import CellFailed, once, run_cells

from megapatch.testing import RanksFailed


def computed(rank):
    total = torch.tensor([float(rank + 1)])
    torch.distributed.all_reduce(total)
    return float(total)


def wrong(value):
    raise ArithmeticError(f"wrong {value}")


def in_turn(rank, world_size):
    """Cells that go well or fail on all ranks, and share what fails or is computed once."""
    calls = []
    shared, broken = once(lambda: calls.append(1) or computed(rank)), once(wrong, "reference")
    yield "first", shared
    yield "wrong", lambda: wrong("cell")
    yield "second", lambda: shared() + len(calls)
    yield "no reference", broken
    yield "no reference, either", broken
    yield "cannot be sent", lambda: lambda: 0
    yield "last", lambda: computed(rank)


def test_cells_that_fail_on_all_ranks_leave_the_others_alone():
    for found in run_cells(in_turn, 2):
        assert [found["first"], found["second"], found["last"]] == [3.0, 4.0, 3.0]
        for cell, text in {
            "wrong": "ArithmeticError: wrong cell",
            "no reference": "ArithmeticError: wrong reference",
            "no reference, either": "ArithmeticError: wrong reference",
            "cannot be sent": "lambda",
        }.items():
            with pytest.raises(CellFailed, match=f"cell '{cell}' failed") as raised:
                found[cell]
            assert text in str(raised.value)
            assert str(raised.value).count("Traceback") >= 2  # of both ranks
        with pytest.raises(KeyError):
            found["there is none"]


def left_apart(rank, world_size, how):
    yield "good", lambda: computed(rank)
    yield "bad", lambda: ENDINGS[how](rank)
    yield "later", lambda: computed(rank)


def raises_on_one(rank):
    return rank if rank else wrong(rank)


def hangs_on_one(rank):
    return computed(rank) if rank else wrong(rank)


def raises_elsewhere(rank):
    if rank:
        raise KeyError(rank)
    wrong(rank)


ENDINGS = {function.__name__: function for function in (raises_on_one, hangs_on_one, raises_elsewhere)}


@pytest.mark.parametrize("how", ENDINGS)
def test_when_ranks_are_left_apart_later_cells_are_not_run(how):
    for found in run_cells(left_apart, 2, how, patience=2.0):
        assert found["good"] == 3.0
        with pytest.raises(CellFailed, match="rank 0 of 2: Traceback") as raised:
            found["bad"]
        text = str(raised.value)
        assert "ArithmeticError: wrong 0" in text
        assert ("in computed" in text) == (how == "hangs_on_one")  # where the other rank waits
        assert ("KeyError: 1" in text) == (how == "raises_elsewhere")
        with pytest.raises(CellFailed, match=r"not run: .* different places by cell 'bad'"):
            found["later"]


def failing_between(rank, world_size):
    yield "good", lambda: rank
    wrong("layout")
    yield "later", lambda: rank


def test_what_fails_between_cells_is_not_lost():
    for found in run_cells(failing_between, 2):
        for cell in ("good", "later"):
            with pytest.raises(CellFailed, match="cell 'good'") as raised:
                found[cell]
            assert ("wrong layout" in str(raised.value)) == (cell == "good")


def failing_first(rank, world_size):
    wrong("from the start")
    yield


def test_a_job_without_cells_fails_as_ever():
    with pytest.raises(RanksFailed, match="wrong from the start"):
        run_cells(failing_first, 2)
