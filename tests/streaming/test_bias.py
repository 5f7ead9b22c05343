"""The bias of each policy against long rollouts, simulated, as docs/streaming.md has it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from rigs.streaming.rollout_bias import CASES, mean, p90, simulate, table
from rigs.streaming.world import run

PAGE = Path(__file__).parents[2] / "docs" / "streaming.md"


@pytest.fixture(scope="module")
def outcomes():
    return {case: run(simulate(*case)) for case in CASES}


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "weight_fifo"], ids=str)
def test_training_sees_what_generation_makes(outcomes, case):
    outcome = outcomes[case]
    assert outcome.evicted == 0
    assert mean(outcome.trained) == pytest.approx(mean(outcome.generated), rel=0.02)
    assert p90(outcome.trained) == pytest.approx(p90(outcome.generated), rel=0.02)


@pytest.mark.parametrize("case", [("windowed", 0), ("windowed", 1), ("ready_first", 1)], ids=str)
def test_the_others_train_on_short_ones(outcomes, case):
    """That they do shows that the simulation can tell."""
    outcome = outcomes[case]
    assert outcome.thrown_away > 0.1
    assert mean(outcome.trained) < 0.7 * mean(outcome.generated)


def test_rollouts_that_are_not_announced_are_biased_and_this_is_told(caplog):
    class Permit:
        def __init__(self, pump):
            self.pump = pump

        async def __aenter__(self):
            await self.pump.rollouts_permitted()

        async def __aexit__(self, *error):
            return None

    with caplog.at_level(logging.WARNING, logger="megapatch"):
        outcome = run(simulate("weight_fifo", 1, lambda pump, group: Permit(pump)))
    assert mean(outcome.trained) < 0.9 * mean(outcome.generated)
    assert caplog.text.count("training sees too many short ones") == 1


def test_the_page_has_these_numbers(outcomes):
    """To 0.15 s and 1.5%: event loops of other Python versions may take turns in another order."""
    lines = PAGE.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| `pick` | `max_staleness`"))
    ours = table(outcomes)
    shown = lines[first : first + len(ours)]
    number = r"\d+(?:\.\d+)?"
    for line, other in zip(shown, ours, strict=True):
        assert re.sub(number, "", line) == re.sub(number, "", other)
        for left, right in zip(re.findall(number, line), re.findall(number, other), strict=True):
            assert float(left) == pytest.approx(float(right), abs=0.15 if "." in left else 1.5), (line, other)
