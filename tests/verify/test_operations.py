"""The kinds of waits that verify counts: what a GPU's queue would have to be empty for."""

from __future__ import annotations

import threading

import numpy
import pytest
import torch

from megapatch._verify.operations import Operations

VALUES = torch.arange(4.0)
MASK = VALUES > 1
WAITS = {
    "item": lambda: VALUES.sum().item(),
    "float": lambda: float(VALUES[0]),
    "bool": lambda: bool(MASK.any()),
    "format": lambda: f"{VALUES.sum():g}",
    "slice": lambda: VALUES[: torch.tensor(2)],
    "tolist": lambda: VALUES.tolist(),
    "tolist of one": lambda: VALUES.sum().tolist(),
    "cpu": lambda: VALUES.cpu(),
    "numpy": lambda: VALUES.numpy(),
    "asarray": lambda: numpy.asarray(VALUES),
    "equal": lambda: torch.equal(VALUES, VALUES),
    "allclose": lambda: torch.allclose(VALUES, VALUES),
    "nonzero": lambda: VALUES.nonzero(),
    "where": lambda: torch.where(MASK),
    "mask": lambda: VALUES[MASK],
    "mask beside a slice": lambda: torch.ones(2, 4)[:, MASK],
    "masked_select": lambda: VALUES.masked_select(MASK),
    "assigned by a mask": lambda: VALUES.clone().index_put_((MASK,), VALUES[:2]),
    "unique": lambda: VALUES.unique(),
    "repeated": lambda: torch.repeat_interleave(torch.tensor([1, 2])),
}
NONE = {
    "arithmetic": lambda: VALUES + VALUES.sum(),
    "index": lambda: VALUES[torch.tensor([1, 2])],
    "filled by a mask": lambda: VALUES.clone().__setitem__(MASK, 0.0),
    "where of three": lambda: torch.where(MASK, VALUES, 0.0),
    "repeated to a known size": lambda: torch.repeat_interleave(torch.tensor([1, 2]), output_size=3),
}
DEEP = 70  # autograd continues in another thread where backward passes are nested more than 60 deep


def listed(function):
    with Operations() as operations:
        function()
    return operations.waits


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_counted_once(what):
    assert len(listed(WAITS[what])) == 1


@pytest.mark.parametrize("what", NONE)
def test_other_operations_are_not(what):
    assert listed(NONE[what]) == []


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, depth, inmost):
        ctx.depth, ctx.inmost = depth, inmost
        return values * 1

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            backward(ctx.depth - 1, ctx.inmost)
        else:
            ctx.inmost(gradient)
        return gradient, None, None


def backward(depth, inmost):
    with torch.enable_grad():
        Nested.apply(torch.ones(1, requires_grad=True), depth, inmost).backward()


def test_autograds_own_threads_are_looked_at():
    threads = []

    def inmost(gradient):
        threads.append(threading.get_ident())
        gradient.tolist()
        gradient.item()

    assert [wait.name for wait in listed(lambda: backward(DEEP, inmost))] == [
        "Tensor.tolist",
        "aten::_local_scalar_dense",
    ]
    assert threads != [threading.get_ident()]


def test_other_threads_are_not():
    def elsewhere():
        thread = threading.Thread(target=VALUES.tolist)
        thread.start()
        thread.join()

    assert listed(elsewhere) == []


def test_methods_are_put_back():
    before = torch.Tensor.cpu, torch.Tensor.tolist
    listed(VALUES.tolist)
    assert (torch.Tensor.cpu, torch.Tensor.tolist) == before
    assert "tolist" not in vars(torch.Tensor)
