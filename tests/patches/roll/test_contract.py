"""ROLL's patches keep the contract."""

import math

import pytest
from rigs.contract import check_family
from rigs.roll.runs import set_scale
from rigs.roll.strategy import find_roll, strategy_of, train

from megapatch.patches._catalogue import of_family
from megapatch.patches.roll import grad_scale, overflow_is_skipped
from megapatch.testing import init_parallel

pytestmark = pytest.mark.thorough


def hook():
    init_parallel()
    strategy = strategy_of()
    assert strategy.model.config.grad_scale_func is not None


def skipped_step():
    init_parallel()
    strategy = strategy_of()
    strategy.optimizer.step = lambda: (False, None, None)
    set_scale(strategy, 1.0)
    assert train(strategy, 0)["actor/grad_norm"] == math.inf
    assert strategy.scheduler.steps == 0


SCENARIOS = {grad_scale.PATCH: hook, overflow_is_skipped.PATCH: skipped_step}


@pytest.mark.every_patch("roll")
def test_the_contract_is_kept():
    check_family(of_family("roll"), SCENARIOS, find_roll)
