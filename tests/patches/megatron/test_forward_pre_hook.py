"""megatron.forward-pre-hook on the real DistributedDataParallel, at 2 and 4 ranks."""

import itertools
from functools import partial

import pytest
from rigs.cells import run_cells
from rigs.imported import run_with_megatron
from rigs.megatron.gathers import Collectives
from rigs.megatron.options import ADAM, BOTH, UNPATCHED, assert_same_parameters, buckets

from megapatch.testing import init_parallel, tiny_gpt


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (AssertionError, KeyError) as error:
        return type(error).__name__
    return None


def under_way(ddp):
    return any(group.param_gather_handle for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups)


def defect(rank, world_size):
    init_parallel()
    ddp = tiny_gpt(**BOTH).chunks[0]
    enabled_twice = raised(ddp.enable_forward_pre_hook)
    ddp.disable_forward_pre_hook()
    return {"enable": enabled_twice, "disable": raised(ddp.disable_forward_pre_hook)}


@pytest.mark.quick
def test_without_the_patch_a_repeated_call_fails():
    assert run_with_megatron(defect, 2, env=UNPATCHED) == [{"enable": "AssertionError", "disable": "KeyError"}] * 2


def behaviour(rank, world_size):
    """Everything that needs one model, in one go; returns what was found."""
    found = {"twice": defect(rank, world_size)}
    init_parallel()
    model, gathers = tiny_gpt(**BOTH), Collectives()
    (ddp,) = model.chunks
    modules = len(list(ddp.module.modules()))
    handles = ddp.remove_forward_pre_hook_handles

    found["handles"] = []
    for switch_on in (True, False, False, True, True, False):
        (ddp.enable_forward_pre_hook if switch_on else ddp.disable_forward_pre_hook)()
        found["handles"].append(len(handles) / modules)
    found["same dict"] = type(handles) is dict and ddp.remove_forward_pre_hook_handles is handles

    model.train_step(0)  # hooks are off: stepped, not gathered
    found["not asked for"] = gathers.during(ddp.disable_forward_pre_hook, param_sync=False)
    found["missing"] = gathers.during(ddp.disable_forward_pre_hook)
    found["buckets"] = buckets(ddp)
    found["all there"] = gathers.during(ddp.disable_forward_pre_hook, True)

    model.train_step(1)
    ddp.start_param_sync()
    found["under way before"] = under_way(ddp)
    found["under way"] = gathers.during(ddp.disable_forward_pre_hook)
    found["under way after"] = under_way(ddp)

    model.train_step(2)
    first = ddp.bucket_groups[0]
    first.start_param_sync()  # one group gathered, the others not
    found["rest"] = gathers.during(ddp.disable_forward_pre_hook)
    found["rest expected"] = buckets(ddp) - len(first.buckets)

    model.train_step(3)
    # On CPU nothing is MXFP8; the switch alone decides.
    object.__setattr__(ddp.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", True)
    found["mxfp8"] = gathers.during(ddp.disable_forward_pre_hook)
    object.__setattr__(ddp.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
    found["after mxfp8"] = gathers.during(ddp.disable_forward_pre_hook)

    plain = tiny_gpt(use_distributed_optimizer=True, **ADAM).chunks[0]
    found["no overlap"] = [raised(plain.disable_forward_pre_hook), raised(plain.enable_forward_pre_hook)]
    return found


@pytest.fixture(scope="module")
def found():
    first, second = run_with_megatron(behaviour, 2)
    assert first == second
    return first


def test_with_the_patch_it_does_not(found):
    assert found["twice"] == {"enable": None, "disable": None}


def test_any_order_leaves_the_hooks_on_or_off_in_megatrons_own_dict(found):
    assert found["handles"] == [1, 0, 0, 1, 1, 0]
    assert found["same dict"]


def test_a_disable_that_removes_nothing_gathers_what_was_not_gathered_since_the_step(found):
    assert found["not asked for"] == 0
    assert found["missing"] == found["buckets"] > 1
    assert found["all there"] == 0
    assert 0 < found["rest"] == found["rest expected"]


def test_it_waits_for_a_gather_under_way_and_adds_none(found):
    assert found["under way before"]
    assert found["under way"] == 0
    assert not found["under way after"]


def test_it_never_gathers_when_the_gradient_buffer_holds_the_parameters(found):
    assert found["mxfp8"] == 0
    assert found["after mxfp8"] == found["buckets"]


def test_without_overlap_megatrons_own_error_stays(found):
    assert found["no overlap"] == ["AssertionError", "AssertionError"]


CASES = {  # ranks, layout, more options
    "dp2": (2, {}, {}),
    "pp2 vpp2 dp2": (4, {"pp": 2, "vpp": 2}, {}),
    "ep2 dp2": (4, {"ep": 2}, {"experts": 4}),
}


def switched(rank, world_size):
    for name, layout, extra in cases(world_size):
        yield name, partial(trained, layout, {**BOTH, **extra}, True)


def plain(rank, world_size):
    for name, layout, extra in cases(world_size):
        yield name, partial(trained, layout, {**ADAM, **extra}, False)


def cases(world_size):
    return [(name, layout, extra) for name, (ranks, layout, extra) in CASES.items() if ranks == world_size]


def trained(layout, options, switching):
    """Norms and parameters of four steps; between them hooks go off and on, as around checkpoints."""
    init_parallel(**layout)
    model = tiny_gpt(layers=4, **options)
    norms = []
    for step in range(4):
        norms.append(model.train_step(step).grad_norm)
        if switching:
            for chunk, again in itertools.product(model.chunks, range(1 + step % 2)):
                chunk.disable_forward_pre_hook(param_sync=again == 0)
                chunk.disable_forward_pre_hook()
            for chunk in model.chunks[: 1 + step]:  # not all chunks alike, at first
                chunk.enable_forward_pre_hook()
                chunk.enable_forward_pre_hook()
    for chunk in model.chunks if switching else ():
        chunk.disable_forward_pre_hook()
    return norms, model.parameters()


@pytest.fixture(scope="module")
def runs():
    """By number of ranks: what every rank found with hooks switched, and in the run to compare with."""
    return {ranks: (run_cells(switched, ranks), run_cells(plain, ranks, env=UNPATCHED)) for ranks in (2, 4)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick
def test_switching_hooks_between_steps_gives_the_numbers_of_a_run_without_overlap(runs, name):
    for found, expected in zip(*runs[CASES[name][0]], strict=True):
        assert found[name][0] == pytest.approx(expected[name][0], rel=1e-5)
        assert_same_parameters(found[name][1], expected[name][1])
