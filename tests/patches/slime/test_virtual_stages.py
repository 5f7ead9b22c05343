"""slime.train-reentry with virtual pipeline stages, where the hooks are lists, of one for each model chunk."""

import pytest
from rigs.cells import RAISING
from rigs.imported import run_with_megatron
from rigs.megatron.options import ADAM, BOTH, UNPATCHED, assert_same_parameters
from rigs.slime.train import SlimeLoop, find_slime

from megapatch.testing import init_parallel, tiny_gpt

pytestmark = pytest.mark.thorough

LAYOUT = {"pp": 2, "vpp": 2}  # at 4 ranks two are data parallel


def loop_for(options):
    init_parallel(**LAYOUT)
    return SlimeLoop(tiny_gpt(layers=4, hooks=False, **options))


def after_rollouts(options, between=lambda loop: None):
    """Return the parameters after each of three rollouts, and the log."""
    loop, parameters = loop_for(options), []
    for _ in range(3):
        loop.train(2)
        parameters.append(loop.model.parameters())
        between(loop)
    return parameters, loop.log


def plain(rank, world_size):
    return after_rollouts({**ADAM, "use_distributed_optimizer": True})


def rollouts(rank, world_size):
    """Between them a save(), and a forward pass, in which the schedule begins gathers (align_param_gather)."""

    def between(loop):
        loop.save()
        loop.model.forward_backward(forward_only=True)

    return after_rollouts({**BOTH, "align_param_gather": True}, between)


def test_rollouts_give_the_numbers_of_a_run_without_overlap():
    got = run_with_megatron(rollouts, 4, env=RAISING, setup=find_slime)
    expected = run_with_megatron(plain, 4, env=UNPATCHED, setup=find_slime)
    assert sum(len(log) for _, log in got) == 6
    for (parameters, log), (plain_parameters, plain_log) in zip(got, expected, strict=True):
        for found, reference in zip(parameters, plain_parameters, strict=True):
            assert_same_parameters(found, reference)
        for step, plain_step in zip(log, plain_log, strict=True):
            assert step == pytest.approx(plain_step, rel=1e-5)
