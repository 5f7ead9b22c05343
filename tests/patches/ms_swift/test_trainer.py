"""ms-swift's own trainer on two ranks: what fails or is wrong without the patches, and what it does with them."""

import math

import pytest
from rigs.cells import run_cells
from rigs.ms_swift.runs import cells
from rigs.ms_swift.trainer import RELEASES, STEPS, find_swift, needs_swift

pytestmark = needs_swift

ASSERTION = (
    "When overlap_grad_reduce is True, config.no_sync_func must be None; "
    "a custom no_sync_func is not supported when overlapping grad-reduce"
)
TUNERS = "full", "lora"
OWN = {"ms_swift.overflow-is-skipped": "applied", "ms_swift.train-reentry": "applied"}


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.name)
def ranks(request):
    return run_cells(cells, 2, audited=True, setup=find_swift, env={"SWIFT_RELEASE": request.param.folder})


# ------------------------------------------------------------------------------------------ weight syncs
@pytest.mark.parametrize("tuner", TUNERS)
def test_without_patches_vllm_gets_a_mixture(ranks, tuner):
    """It gets the weights before the first step, and then those after each step but the last."""
    for found in ranks:
        (first, *later), after, moved = found[f"{tuner}, without"]
        assert first == 0.0
        assert len(later) == STEPS - 1
        assert all(0.3 < fraction < 0.8 for fraction in later)
        assert moved < 1e-6  # merged and unmerged again with the same adapters, but for rounding
        assert after == 0.0 or tuner == "lora"


@pytest.mark.parametrize("tuner", TUNERS)
def test_vllm_gets_the_weights_of_the_last_step(ranks, tuner):
    for found in ranks:
        assert found[f"{tuner}, with"] == ([0.0] * STEPS, 0.0, 0.0)
        assert found[f"{tuner}, in Ray's worker"] == ([0.0] * STEPS, 0.0)


# ------------------------------------------------------------------------------------------ set up again
def test_without_the_patch_a_trainer_is_set_up_once(ranks):
    for found in ranks:
        assert found["setup, without"] == ("AssertionError", ASSERTION)
        assert found["cleared by hand, without"] > 0.9  # parameters that were not gathered


@pytest.mark.parametrize("how", ["two setups", "two setups, virtual stages", "two setups, at last"])
def test_a_trainer_that_is_set_up_again_trains_on(ranks, how):
    for found in ranks:
        assert found[how] == 0.0


def test_train_can_be_called_again(ranks):
    for found in ranks:
        assert found["two trains"] == (2 * STEPS, 0.0)


def test_a_hook_of_others_is_still_refused(ranks):
    for found in ranks:
        assert found["hook of others"] == (("AssertionError", ASSERTION), True)


# ------------------------------------------------------------------------------------------ fp16
def test_without_the_patch_fp16_ends_in_its_first_step(ranks):
    for found in ranks:
        kind, text = found["fp16, without"]
        assert kind == "RuntimeError"
        assert "in local grad norm for bucket #0" in text
        assert found["fp16, without the check"] == ("TypeError", "must be real number, not NoneType")


@pytest.mark.parametrize("how", ["fp16", "fp16, in a pipeline", "fp16, saved and evaluated"])
def test_steps_are_skipped_until_one_can_be_taken(ranks, how):
    """Those that are taken are the ones of a trainer that begins with the last loss scale, to the last bit."""
    for rank, found in enumerate(ranks):
        steps, texts, different, norm = found[how]
        *skips, first, last = steps
        assert len(skips) > 10
        assert all(step[1:] == (0, math.inf) for step in skips)
        assert (first[1], last[1]) == (1, 2)
        assert last[2] == pytest.approx(norm, rel=1e-6)
        assert different == 0.0
        logged = [text for text in texts if "the loss scale is now" in text]
        assert len(logged) == (0 if rank else len(skips))


def test_saving_in_a_skipped_first_step_takes_megatrons_patch(ranks):
    for found in ranks:
        assert found["fp16, saved and evaluated, without"] == "KeyError"


def test_what_is_not_fp16_is_still_checked(ranks):
    for found in ranks:
        kind, text = found["not fp16"]
        assert kind == "RuntimeError"
        assert "found NaN" in text


# ------------------------------------------------------------------------------------------ its own patches
def test_ms_swifts_patches_and_ours_stand_side_by_side(ranks):
    """ms-swift's are applied when it is imported, before ours here, and again after them."""
    for found in ranks:
        assert found["patched by ms-swift"] == found["patched by both"]
        assert len(found["patched by both"]) == 3
        for when in ("statuses", "statuses, 1 later", "statuses, 2 later"):
            assert OWN.items() <= found[when].items()
            assert not {"refused", "failed", "overwritten", "missed"} & set(found[when].values())


@pytest.mark.parametrize("tuner", TUNERS)
def test_the_audit_finds_exports_of_parameters_that_were_not_gathered(ranks, tuner):
    """LoRA's layers are merged and unmerged with different adapters, which changes the base weights for good."""
    read, later = ("gathered-when-read",), ()
    if tuner == "lora":  # the merge reads, and then the export
        read, later = read * 2, ("ranks-agree",)
    for found in ranks:
        assert found.broken[f"{tuner}, without"] == (*read, *later)
