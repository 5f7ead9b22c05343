"""megatron.train-reentry on the real train(), at 2 ranks; wheels have it from 0.17 on."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import sys

import pytest
from megatron_rig import ADAM, BOTH, GRADS, UNPATCHED, Interrupted, assert_same, plain_steps

from megapatch import apply, report, restore
from megapatch.testing import (
    Fault,
    MegatronLoop,
    init_parallel,
    megatron_training_available,
    run_ranks,
    tiny_gpt,
)

pytestmark = pytest.mark.skipif(
    not megatron_training_available(), reason="this megatron-core has no megatron.training (wheels: from 0.17)"
)


# ------------------------------------------------------------------------------------------ the defect
def failures_one_by_one(rank, world_size):
    """What the second call raises, each failure after the one before was cleared away by hand."""
    init_parallel()
    model = tiny_gpt(hooks=False, **BOTH)
    loop, texts = MegatronLoop(model), []
    loop.train(2)
    for clear in (
        lambda: None,
        lambda: setattr(model.config, "no_sync_func", None),
        lambda: sys.modules["megatron.training.global_vars"].get_timers()("interval-time").stop(),
    ):
        clear()
        try:
            loop.train(2)
        except (AssertionError, KeyError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        if len(texts) > 1:  # it got as far as setting its hooks again
            model.config.no_sync_func = None
    return texts


def test_without_the_patch_a_second_call_fails_three_times_over():
    first, second, third = run_ranks(failures_one_by_one, 2, env=UNPATCHED)[0]
    assert "config.no_sync_func must be None" in first
    assert "timer has already been started" in second
    assert third.startswith(("KeyError: DistributedDataParallel(", "KeyError: GPTModel("))


# ------------------------------------------------------------------------------------------ the repair
def called_again(rank, world_size, layout, options, calls, steps):
    init_parallel(**layout)
    model = tiny_gpt(layers=4, hooks=False, **options)
    loop = MegatronLoop(model)
    return [loss for _ in range(calls) for loss in loop.train(steps)], model.parameters()


@pytest.mark.parametrize(
    ("world_size", "layout", "options", "plain"),
    [
        pytest.param(2, {}, {}, {}, id="dp2"),
        pytest.param(2, {}, GRADS, {}, id="dp2 grads"),
        pytest.param(2, {}, BOTH, ADAM, id="dp2 both"),
        pytest.param(2, {}, {**BOTH, "align_param_gather": True}, ADAM, id="dp2 both aligned"),
        pytest.param(2, {"pp": 2}, GRADS, {}, id="pp2 grads"),
        pytest.param(4, {"pp": 2, "vpp": 2}, BOTH, ADAM, id="pp2 vpp2 dp2 both"),
        pytest.param(4, {"ep": 2}, {**BOTH, "experts": 4}, {**ADAM, "experts": 4}, id="ep2 dp2 both"),
    ],
)
def test_three_calls_give_the_numbers_of_a_run_without_overlap_and_without_train(
    world_size, layout, options, plain
):
    got = run_ranks(called_again, world_size, layout, options, 3, 2)
    assert_same(got, run_ranks(plain_steps, world_size, layout, plain, 6, env=UNPATCHED))


# ------------------------------------------------------------------------------------------ one model each
class Log(logging.Handler):
    """Keeps what megapatch says in this process."""

    def __init__(self):
        super().__init__()
        self.texts = []
        logging.getLogger("megapatch").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


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
    found = run_ranks(users_hooks, 2)[0]
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
    told = report().to_dict()["patches"][1]["sites"][0]
    losses += loop.train(2) + loop.train(2)
    rebound = holder.train_by_name is sys.modules["megatron.training.training"].train
    return losses, model.parameters(), told, rebound


def _wrap_no_sync():
    from megapatch.install import install
    from megapatch.patch import Site

    module = sys.modules["megatron.core.distributed.distributed_data_parallel"]

    def wrap(no_sync):
        def replacement(self):
            return no_sync(self)

        replacement.__wrapped__ = no_sync
        return replacement

    install("test.no-sync", module, Site(module.__name__, None, {"DistributedDataParallel.no_sync": wrap}))


def test_activation_between_two_calls():
    got = run_ranks(activated_between_calls, 2)
    reference = run_ranks(plain_steps, 2, {}, ADAM, 6, env=UNPATCHED)
    assert_same([(losses, parameters) for losses, parameters, _, _ in got], reference)
    for _, _, told, rebound in got:
        assert rebound
        assert told["targets"] == ["megatron.training.training:train"]
        assert f"{__name__}:train_by_name" in told["rebound"]


def gathers_of(rank, world_size, calls, steps):
    """How many buckets train() gathers over some calls, and how many it would have to."""
    init_parallel()
    model = tiny_gpt(layers=4, hooks=False, **BOTH)
    loop, count = MegatronLoop(model), 0
    module = sys.modules["megatron.core.distributed.param_and_grad_buffer"]
    gather = module.dist_all_gather_func

    def counting(*args, **kwargs):
        nonlocal count
        count += 1
        return gather(*args, **kwargs)

    module.dist_all_gather_func = counting
    for _ in range(calls):
        loop.train(steps)
    return count, calls * steps * sum(len(group.buckets) for group in model.chunks[0].bucket_groups)


def test_no_gather_more_than_once_a_step_and_bucket():
    for calls, steps in ((1, 4), (4, 1), (3, 2)):
        for count, needed in run_ranks(gathers_of, 2, calls, steps):
            assert count == needed
    assert run_ranks(gathers_of, 2, 1, 4, env=UNPATCHED) == run_ranks(gathers_of, 2, 1, 4)


def what_stays_the_callers(rank, world_size):
    init_parallel()
    model = tiny_gpt(hooks=False)
    log, said = Log(), []
    loop = MegatronLoop(model, flags=["--manual-gc"])
    graphs = importlib.import_module("megatron.core.full_cuda_graph").FullCudaGraphWrapper.cuda_graph
    for _ in range(2):
        log.texts.clear()
        gc.enable()
        loop.train(2)
        loop.iteration = 0
        loop.train(1)
        graphs["training"] = object()
        loop.train(1)
        graphs["training"] = None
        said.append(list(log.texts))
    gc.enable()
    return said


def test_what_stays_the_callers_is_warned_of_once():
    first, second = run_ranks(what_stays_the_callers, 2)[0]
    assert second == []
    assert len(first) == 3
    for text in ("garbage collector", "starts again at iteration 0 though the last call ended at 2", "CUDA graph"):
        assert sum(text in said for said in first) == 1
