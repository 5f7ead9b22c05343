"""megatron.train-reentry on the real train(), at 2 ranks; wheels have it from 0.17 on."""

import contextlib
import sys
from functools import partial

import pytest
from rigs.cells import run_cells
from rigs.imported import run_with_megatron
from rigs.megatron.options import (
    ADAM,
    BOTH,
    GRADS,
    UNPATCHED,
    Gathers,
    Interrupted,
    assert_same,
    buckets,
    needs_training,
    plain_steps,
)

from megapatch import apply, report, restore
from megapatch._cli.demo import train_without
from megapatch.testing import Fault, MegatronLoop, init_parallel, tiny_gpt

pytestmark = needs_training


# ------------------------------------------------------------------------------------------ the defect
@pytest.mark.quick
def test_without_the_patch_a_second_call_fails_three_times_over():
    outcome = run_with_megatron(train_without, 2, env=UNPATCHED)[
        0
    ]  # each failure cleared away by hand before the next
    first, second, third = (text for _, text in outcome.errors)
    assert "config.no_sync_func must be None" in first
    assert "timer has already been started" in second
    assert third.startswith(("KeyError: DistributedDataParallel(", "KeyError: GPTModel("))


# ------------------------------------------------------------------------------------------ the repair
ALIGNED = {**BOTH, "align_param_gather": True}
CASES = {  # ranks, layout, options, options of the run without overlap
    "dp2": (2, {}, {}, {}),
    "dp2 grads": (2, {}, GRADS, {}),
    "dp2 both": (2, {}, BOTH, ADAM),
    "dp2 both, validated": (2, {}, BOTH, ADAM),
    "dp2 both aligned": (2, {}, ALIGNED, ADAM),
    "pp2 grads": (2, {"pp": 2}, GRADS, {}),
    "pp2 vpp2 dp2 both": (4, {"pp": 2, "vpp": 2}, BOTH, ADAM),
    "ep2 dp2 both": (4, {"ep": 2}, {**BOTH, "experts": 4}, {**ADAM, "experts": 4}),
}


def called_three_times(rank, world_size):
    """Losses and parameters of each case for so many ranks, after three calls of two steps."""
    for name, (ranks, layout, options, _) in CASES.items():
        if ranks == world_size:
            rerun_mode = "validate_results" if "validated" in name else "disabled"
            yield name, partial(three_calls, layout, options, rerun_mode)


def three_calls(layout, options, rerun_mode):
    init_parallel(**layout)
    model = tiny_gpt(layers=4, hooks=False, **options)
    loop = MegatronLoop(model, rerun_mode=rerun_mode)
    return [loss for _ in range(3) for loss in loop.train(2)], model.parameters()


def plain_runs(rank, world_size):
    for name, (ranks, layout, _, options) in CASES.items():
        if ranks == world_size:
            yield name, partial(plain_steps, rank, world_size, layout, options, 6)


@pytest.fixture(scope="module")
def runs():
    """By number of ranks: what every rank found with train() called again, and in the run to compare with."""
    return {
        ranks: (run_cells(called_three_times, ranks, audited=True), run_cells(plain_runs, ranks, env=UNPATCHED))
        for ranks in (2, 4)
    }


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick
def test_three_calls_give_the_numbers_of_a_run_without_overlap_and_without_train(runs, name):
    again, plain = runs[CASES[name][0]]
    assert_same([found[name] for found in again], [found[name] for found in plain])


# ------------------------------------------------------------------------------------------ one model each
def users_hooks(rank, world_size):
    init_parallel()
    model = tiny_gpt(hooks=False, **BOTH)
    loop, found = MegatronLoop(model), {}
    loop.train(1)
    for name, own in {"function": contextlib.nullcontext, "list": [contextlib.nullcontext]}.items():
        model.config.no_sync_func = own
        try:
            loop.train(1)
        except AssertionError as error:
            found[name] = str(error), model.config.no_sync_func is own
    model.config.no_sync_func = None

    param_sync = model.config.param_sync_func = lambda *ignored: None
    with contextlib.suppress(Interrupted):
        loop.train(2, fault=Fault(Interrupted(), microbatch=1))
    found["param_sync after an exception"] = model.config.param_sync_func is param_sync
    loop.train(0)
    found["param_sync after no step"] = model.config.param_sync_func is param_sync
    return found


def test_hooks_that_a_user_set_stay_and_meet_megatrons_own_assertion():
    found = run_with_megatron(users_hooks, 2)[0]
    for name in ("function", "list"):
        text, kept = found[name]
        assert "a custom no_sync_func is not supported" in text
        assert kept
    assert found["param_sync after an exception"]
    assert found["param_sync after no step"]


def activated_between_calls(rank, world_size):
    """megapatch comes after the first call; so does a patch of no_sync, whose old bound method train() set."""
    restore()
    init_parallel()
    model = tiny_gpt(layers=4, hooks=False, **BOTH)
    loop = MegatronLoop(model)
    holder = sys.modules[__name__]
    holder.train_by_name = sys.modules["megatron.training.training"].train
    losses = loop.train(2)
    apply()
    _wrap_no_sync()
    (patch,) = (each for each in report().to_dict()["patches"] if each["name"] == "megatron.train-reentry")
    told = patch["sites"][0]
    losses += loop.train(2) + loop.train(2)
    rebound = holder.train_by_name is sys.modules["megatron.training.training"].train
    return losses, model.parameters(), told, rebound


def _wrap_no_sync():
    from megapatch._engine.install import install
    from megapatch.patch import Site

    module = sys.modules["megatron.core.distributed.distributed_data_parallel"]

    def wrap(no_sync):
        def patched(self):
            return no_sync(self)

        patched.__wrapped__ = no_sync
        return patched

    install("test.no-sync", module, Site(module.__name__, None, {"DistributedDataParallel.no_sync": wrap}))


def test_activation_between_two_calls():
    got = run_with_megatron(activated_between_calls, 2)
    reference = run_with_megatron(plain_steps, 2, {}, ADAM, 6, env=UNPATCHED)
    assert_same([(losses, parameters) for losses, parameters, _, _ in got], reference)
    for _, _, told, rebound in got:
        assert rebound
        assert told["targets"] == [f"megatron.training.training:{name}" for name in ("train", "train_step")]
        assert f"{__name__}:train_by_name" in told["rebound"]


CALLS_AND_STEPS = ((1, 4), (4, 1), (3, 2))


def gathers(rank, world_size, calls_and_steps):
    """How many buckets train() gathers over some calls, and how many it would have to."""
    init_parallel()
    found = []
    for calls, steps in calls_and_steps:
        model = tiny_gpt(layers=4, hooks=False, **BOTH)
        loop, counter = MegatronLoop(model), Gathers()
        count = sum(counter.during(loop.train, steps) for _ in range(calls))
        found.append((count, calls * steps * buckets(model.chunks[0])))
    return found


def test_no_gather_more_than_once_a_step_and_bucket():
    found = run_with_megatron(gathers, 2, CALLS_AND_STEPS)
    for count, needed in found[0] + found[1]:
        assert count == needed
    # The first call of a process gathers no more than it does without megapatch.
    assert run_with_megatron(gathers, 2, CALLS_AND_STEPS[:1], env=UNPATCHED) == [each[:1] for each in found]
