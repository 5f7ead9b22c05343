"""Drawing sequences, and running them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from random import Random

from rigs.cells import run_cells

from .layouts import LAYOUTS
from .plan import ASYNCHRONOUS, COMPANION, INFERENCE, LOADS, MODELS, NEUTRAL, SAVES, STEPS, Sequence, after, plan
from .ranks import RAISES, job

LONGEST = 7
# By kind, so that the many places of aborts do not crowd out loads, which need a step and a save.
KINDS = (STEPS, STEPS, SAVES, ASYNCHRONOUS, LOADS, LOADS, NEUTRAL, NEUTRAL, COMPANION, MODELS, MODELS)
BEGINNINGS = (
    (),
    ("log probabilities",),
    (INFERENCE,),
    ("step",),
    ("step", "save"),
    ("step", "save", "step"),
    ("step", "async save"),
    ("step", "save", "new model"),
)

Differences = dict[str, str]
"""Differences after a sequence, by kind, in words."""


def drawn(
    seed: int, count: int, layouts: Iterable[str], allowed: Callable[[str, str], bool] = lambda *_: True
) -> list[Sequence]:
    """Return `count` different sequences; the same seed draws the same ones, on every machine.

    Not by hypothesis, which draws few operations often: a try takes a second here.

    allowed   whether an operation is drawn for a layout
    """
    random, found = Random(seed), {}
    while len(found) < count:
        name = random.choice(list(layouts))
        operations = list(plan(Sequence(name, random.choice(BEGINNINGS))).sequence.operations)
        then = plan(Sequence(name, tuple(operations))).then
        for _ in range(random.randint(1, LONGEST - len(operations))):
            kinds = [
                [each for each in kind if allowed(each, name) and after(LAYOUTS[name], then, each) is not None]
                for kind in KINDS
            ]
            operations.append(random.choice(random.choice(list(filter(None, kinds)))))
            then = after(LAYOUTS[name], then, operations[-1])
        found[Sequence(name, tuple(operations))] = None
    return list(found)


def run(chosen: Iterable[Sequence]) -> dict[Sequence, Differences]:
    """Run sequences in two ranks, and return what differs after each.

    A sequence that leaves its ranks in different places ends their processes. Those after it run in new ones.
    """
    left, found = list(dict.fromkeys(chosen)), {}
    while left:
        with tempfile.TemporaryDirectory(prefix="megapatch-way-back-") as folder:
            ranks = run_cells(job, 2, folder, left, timeout=600 + 10 * len(left))
        for sequence in left:
            failed = next((one.failures[sequence] for one in ranks if sequence in one.failures), None)
            if failed is not None:
                found[sequence] = {RAISES: failed}
            elif all(sequence in one.values for one in ranks):
                found[sequence] = {**ranks[1].values[sequence], **ranks[0].values[sequence]}
        before, left = left, [sequence for sequence in left if sequence not in found]
        assert len(left) < len(before), "no sequence was run"
    return {sequence: found[sequence] for sequence in found}
