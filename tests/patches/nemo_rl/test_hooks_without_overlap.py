"""nemo_rl.hooks-without-overlap: real pipelines of 2 stages and 2 data-parallel ranks each.

The function is that of our imitation of Megatron-Bridge and, where MEGATRON_BRIDGE_CHECKOUT names the folder of a
checkout, Bridge's own.
"""

import importlib
import os
import sys
import types

import pytest
from rigs.diagnosed_sources import verdict_of
from rigs.megatron.bridge import BRIDGE, _make, find_bridge, needs_bridge
from rigs.megatron.options import BOTH, assert_same_parameters, hooks_of
from rigs.releases import status_of
from rigs.slime.train import IMITATIONS
from rigs.stand_ins import StandIns
from rigs.variables import folder_in

from megapatch import apply, restore
from megapatch.patches.nemo_rl.hooks_without_overlap import HOOKS, MODULES, UPDATE, diagnose
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

pytestmark = pytest.mark.thorough

CHECKOUT = folder_in("MEGATRON_BRIDGE_CHECKOUT")
NAME, MODULE = "nemo_rl.hooks-without-overlap", MODULES[0]
PER_TOKEN = {"layers": 4, "per_token_loss": True}  # NeMo-RL forces this; then gradients are summed, not averaged
DISTRIBUTED = {**BOTH, "overlap_grad_reduce": False, "overlap_param_gather": False}
CASES = {  # layout, options
    "plain": ({"pp": 2}, {}),
    "distributed optimizer": ({"pp": 2}, DISTRIBUTED),
    "virtual stages": ({"pp": 2, "vpp": 2}, {}),
    "overlap": ({"pp": 2}, BOTH),
}


def find_imitation():
    sys.path.insert(0, str(IMITATIONS))


def find_checkout():
    sys.path.insert(0, os.path.join(CHECKOUT, "src"))
    find_bridge()
    sys.meta_path.insert(0, StandIns([f"{BRIDGE}.training.tokenizers"], _make))  # these want another Megatron


SOURCES = {"imitation": find_imitation, "checkout": find_checkout}


def one_step(case, update=None):
    """(hooks, gradients before the step, parameters after it, the gradient's norm), with the hooks that `update`
    makes, or with those of Megatron's own train()."""
    layout, options = CASES[case]
    init_parallel(**layout)
    model = tiny_gpt(**PER_TOKEN, **options, hooks=update is None)
    if update is not None:
        update(model.chunks, model.config, model.ddp_config, model.optimizer, align_grad_reduce=True)
    model.zero_grad()
    model.forward_backward(0, num_microbatches=4)
    gradients = model.gradients()
    _, norm, _ = model.optimizer.step()
    model.gather_parameters()
    hooks = {name: getattr(model.config, name) is not None for name in HOOKS}
    return hooks, gradients, model.parameters(), float(norm)


def compared(rank, world_size):
    found, module = {"verdicts": verdicts()}, importlib.import_module(MODULE)
    found["status"] = status_of(NAME)
    for case in CASES:
        found[case] = {"reference": one_step(case), "with": one_step(case, getattr(module, UPDATE))}
    restore()
    holder = types.ModuleType("holder")  # NeMo-RL's worker has it by name, and is imported before
    holder.update, sys.modules["holder"] = getattr(module, UPDATE), holder
    for case in CASES:
        found[case]["without"] = one_step(case, holder.update)
    apply()
    found["by name"] = one_step("plain", holder.update)
    found["custom"] = custom_hook(holder.update)
    return found


def custom_hook(update):
    """Of a user, where there is no overlap: by position and by keyword."""
    found = []
    for keywords in (False, True):
        init_parallel()
        model = tiny_gpt(hooks=False)
        model.config.no_sync_func = custom_hook
        arguments = {
            "model": model.chunks,
            "model_config": model.config,
            "ddp_config": model.ddp_config,
            "optimizer": model.optimizer,
        }
        update(**arguments) if keywords else update(*arguments.values())
        hooks = hooks_of(model.config)
        found.append(
            (
                hooks["no_sync_func"] is custom_hook,
                hooks["grad_sync_func"],
                hooks["grad_scale_func"] == model.optimizer.scale_loss,
                hooks["finalize_model_grads_func"] is not None,
            )
        )
    return found


def verdicts():
    module = importlib.import_module(MODULE)
    return {
        "as it is": verdict_of(diagnose, module),
        **{name: verdict_of(diagnose, one) for name, one in made_up()},
    }


def made_up():
    """Modules of the same name, by what is special about them."""
    ddp = importlib.import_module("megatron.core.distributed").DistributedDataParallel

    def good(model, model_config, ddp_config, optimizer, *, align_grad_reduce=True, pg_collection=None):
        if isinstance(model[0], ddp) and ddp_config.overlap_grad_reduce:
            model_config.no_sync_func = model[0].no_sync
        model_config.grad_scale_func = optimizer.scale_loss

    def half(model, model_config, ddp_config, optimizer):
        model_config.grad_sync_func = model[0].start_grad_sync

    def raising(model, model_config, ddp_config, optimizer):
        model_config.no_sync_func = ddp_config.something_new

    for function in (good, half, raising):
        # Under the name in sys.modules, for what looks functions up there.
        module = types.ModuleType(f"made_up_{function.__name__}")
        module.DistributedDataParallel, module._update_model_config_funcs = ddp, function
        sys.modules[module.__name__] = module
        yield function.__name__, module


@pytest.fixture(scope="module", params=SOURCES)
def ranks(request):
    if request.param == "checkout" and not CHECKOUT:
        pytest.skip("MEGATRON_BRIDGE_CHECKOUT is not set")
    return run_ranks(compared, 4, setup=SOURCES[request.param])


def is_needed(ranks):
    """With a checkout it depends; the imitation has the defect."""
    return ranks[0]["verdicts"]["as it is"].kind.value == "needed"


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_megatrons_own_hooks(ranks, case):
    for found in ranks:
        (hooks, gradients, parameters, norm), expected = found[case]["with"], found[case]["reference"]
        assert hooks == expected[0] == dict.fromkeys(HOOKS, case == "overlap")
        assert_same_parameters(gradients, expected[1])
        assert_same_parameters(parameters, expected[2])
        assert norm == pytest.approx(expected[3], rel=1e-5)


def test_without_the_patch_every_stage_but_the_first_reduces_twice(ranks):
    if not is_needed(ranks):
        pytest.skip("this checkout does not have the defect")
    for rank, found in enumerate(ranks):
        _, gradients, _, norm = found["plain"]["without"]
        expected, first = found["plain"]["reference"], rank < 2
        twice = {name: value * (1 if first else 2) for name, value in expected[1].items()}
        assert_same_parameters(gradients, twice)
        assert norm > 1.2 * expected[3]


@pytest.mark.parametrize("case", CASES)
def test_without_the_patch_numbers_differ_where_there_is_no_overlap(ranks, case):
    for found in ranks:
        hooks, _, _, norm = found[case]["without"]
        needed = is_needed(ranks)
        assert hooks == dict.fromkeys(HOOKS, needed or case == "overlap")
        same = norm == pytest.approx(found[case]["reference"][3], rel=1e-3)
        assert same is not (needed and case != "overlap")


def test_who_holds_the_function_by_name_has_the_repaired_one(ranks):
    for found in ranks:
        assert found["by name"][0] == dict.fromkeys(HOOKS, False)
        assert_same_parameters(found["by name"][1], found["plain"]["reference"][1])


def test_a_custom_hook_and_the_other_hooks_stay(ranks):
    for found in ranks:
        assert found["custom"] == [(True, None, True, True)] * 2


def test_verdicts(ranks):
    for found in ranks:
        kinds = {name: verdict.kind.value for name, verdict in found["verdicts"].items()}
        assert found["status"] == ("applied" if kinds["as it is"] == "needed" else "not-needed")
        del kinds["as it is"]
        assert kinds == {
            "good": "fixed",
            "half": "needed",
            "raising": "unknown",
        }
        assert "something_new" in found["verdicts"]["raising"].reason


def own_verdict(rank, world_size):
    return verdict_of(diagnose, importlib.import_module(MODULE)).kind.value


@needs_bridge
def test_a_wheel_does_not():
    (verdict,) = run_ranks(own_verdict, 1, setup=find_bridge)
    assert verdict == "fixed"
