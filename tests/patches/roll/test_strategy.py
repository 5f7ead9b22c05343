"""ROLL's strategy on two ranks: what is wrong or fails without the patches, and what it does with them."""

import pytest
from rigs.cells import cells_of
from rigs.roll.runs import SCALES, cells
from rigs.roll.strategy import CHECKOUT, find_roll

pytestmark = pytest.mark.thorough


ranks = cells_of(cells, 2, audited=True, setup=find_roll)


def test_the_patches_are_applied(ranks):
    for found in ranks:
        own = {"roll.grad-scale": "applied", "roll.overflow-is-skipped": "applied"}
        assert own.items() <= found["statuses"].items()
        assert not {"refused", "failed", "overwritten", "missed"} & set(found["statuses"].values())


def test_without_the_patch_gradients_are_divided_by_a_scale_that_they_never_got(ranks):
    for found in ranks:
        assert found["gradients, without"] < 2 / SCALES[1]


def test_a_step_is_that_without_a_loss_scale(ranks):
    for found in ranks:
        assert found["gradients"] == pytest.approx(1, rel=1e-3)
        assert found["experts"] == pytest.approx(1, rel=2e-3)  # of 11 bits: 3e-4 is seen


def test_without_the_patch_an_overflow_ends_the_job(ranks):
    for found in ranks:
        kind, text = found["overflow, without, unchecked"]
        assert (kind, text) == ("NotImplementedError", "megatron optimizer step failed!")


def test_steps_are_skipped_until_one_can_be_taken(ranks):
    for rank, found in enumerate(ranks):
        steps, texts, off = found["overflow"]
        *skips, first, last = steps
        assert len(skips) > 5
        assert all(step[1:] == (0, True) for step in skips)
        assert [first[1:], last[1:]] == [(1, False), (2, False)]
        assert off == 0.0
        assert len([text for text in texts if "the loss scale is now" in text]) == (0 if rank else len(skips))


def test_bf16_trains_as_before(ranks):
    for found in ranks:
        assert found["bf16"].keys() == found["bf16, without"].keys()
        assert all(value.equal(found["bf16, without"][name]) for name, value in found["bf16"].items())
        kind, text = found["NaN in bf16"]
        assert kind == "RuntimeError" and "found NaN" in text


def test_rolls_own_way_around_parameters_without_gradients_still_works(ranks):
    for found in ranks:
        assert found["unused"] == ([None] * 3, 3)


@pytest.mark.skipif(not CHECKOUT, reason="ROLL_CHECKOUT is not set")
def test_rolls_patches_and_ours_stand_side_by_side(ranks):
    for found in ranks:
        others, not_in_place, (alone, *both) = found["together"]
        assert not_in_place == []
        assert {who for who, _ in others} == {"mcore_adapter.patcher"}
        assert len(others) >= 3
        for parameters in both:
            assert all(value.equal(alone[name]) for name, value in parameters.items())


def test_the_audit_finds_a_loss_that_nobody_scaled(ranks):
    for found in ranks:
        assert found.broken["gradients, without"] == ("scaled-once",)
