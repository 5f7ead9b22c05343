"""Ordinary steps, which meet no defect: they ask no more of the processes with patches than without."""

from __future__ import annotations

from collections import Counter

from ..check import DP, Check, Layout, expect
from ._steps import BOTH, OVERLAP

STEPS = 3


def ordinary_steps(layout: Layout = DP) -> None:
    """List the collectives, messages and waits of the host of steps, without patches and with them.

    Those of the first step may come in another order: megatron.grad-ready-window holds its reduces back.
    """
    from ..._api import apply, restore

    layout.set_up()
    for options in (OVERLAP, BOTH):
        restore()
        without = _listed(layout, options)
        apply()
        with_patches = _listed(layout, options)
        for step, (ours, megatrons) in enumerate(zip(with_patches, without, strict=True), start=1):
            more, less = _beyond(ours, megatrons), _beyond(megatrons, ours)
            expect(not more, f"step {step} has with patches in addition: {more}")
            expect(not less, f"step {step} has without patches in addition: {less}")
            expect(step == 1 or ours == megatrons, f"step {step} has another order with patches")


def _listed(layout: Layout, options: dict[str, object]) -> list[list[str]]:
    from ..operations import Operations

    model = layout.model(**options)
    found = []
    for step in range(STEPS):
        with Operations() as operations:
            model.train_step(step)
        found.append([repr(operation) for operation in operations.found])
    return found


def _beyond(some: list[str], others: list[str]) -> list[str]:
    return list((Counter(some) - Counter(others)).elements())


CHECKS = (Check("ordinary-steps", ordinary_steps, layouts=True, audited=False),)
