"""verl's own engine on two ranks, data parallel and in a pipeline: what fails or is wrong without the patches, and
what it does with them."""

import math

import pytest
import torch
from rigs.cells import run_cells
from rigs.verl.engine import ENGINES, STEPS, find_verl, needs_verl
from rigs.verl.reads import READS
from rigs.verl.runs import cells, trained_in_four

pytestmark = needs_verl

ASSERTION = (
    "When overlap_grad_reduce is True, config.no_sync_func must be None; "
    "a custom no_sync_func is not supported when overlapping grad-reduce"
)
NOT_IMPLEMENTED = "NotImplementedError", "Megatron optimizer step failed. This should not happen"


# A release takes long: the oldest and the newest wheel, and the checkout.
WHEELS = [release for release in ENGINES if release.name != "checkout"]
CHOSEN = [release for release in ENGINES if release in (*WHEELS[:1], *WHEELS[-1:]) or release not in WHEELS]


@pytest.fixture(scope="module", params=CHOSEN, ids=lambda release: release.name)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(release):
    return run_cells(cells, 2, audited=True, setup=find_verl, env={"VERL_RELEASE": release.folder})


def test_the_patches_are_applied(ranks):
    for found in ranks:
        statuses = found["statuses"]
        statuses.pop("verl.weight-sync-resume")  # of a module that the engine does not import
        assert len(statuses) == 5
        assert set(statuses.values()) == {"applied"}


# ------------------------------------------------------------------------------------------ training hooks
def test_without_the_patch_hooks_are_registered_once(ranks):
    for found in ranks:
        assert found["hooks, without"] == (("AssertionError", ASSERTION),) * 2


@pytest.mark.parametrize("overlapping", ["two chunks", "gather"])
def test_virtual_stages_train_with_overlap_as_without(ranks, overlapping):
    for found in ranks:
        (losses, norms, parameters), (expected, norms_expected, reference) = found[f"hooks, {overlapping}"]
        assert losses == expected
        assert norms == norms_expected
        assert len(losses) == STEPS
        assert parameters.keys() == reference.keys()
        assert all(torch.equal(parameters[name], reference[name]) for name in reference)
    assert losses[0] is not None  # on the last stage


@pytest.mark.thorough
def test_they_do_so_with_data_parallel_ranks():
    for (losses, norms, parameters), (expected, expected_norms, reference) in CHOSEN[-1].ranks(trained_in_four, 4):
        assert losses == expected
        assert norms == [norm if norm is None else pytest.approx(norm, rel=1e-6) for norm in expected_norms]
        assert parameters.keys() == reference.keys()
        assert all(torch.equal(parameters[name], reference[name]) for name in reference)


def test_each_chunk_has_its_hooks_after_two_calls(ranks):
    for stage, found in enumerate(ranks):
        hooks = found["hooks, two calls"]
        assert hooks["one"] == ([False, False], [["no_sync"], ["start_grad_sync"]])
        assert hooks["two"] == ([True, True], [["no_sync"] * 2, ["start_grad_sync"] * 2])
        assert hooks["one, losses"]
        assert hooks["two, losses"] is (stage == 1)


def test_a_hook_of_others_is_still_refused(ranks):
    for found in ranks:
        assert found["hooks, of others"] == (("AssertionError", ASSERTION), True)


# ------------------------------------------------------------------------------------------ overflow
def test_without_the_patch_an_overflow_ends_the_job(ranks):
    for found in ranks:
        failure, scale_is_smaller, changed = found["overflow, without"]
        assert failure == NOT_IMPLEMENTED
        assert scale_is_smaller  # Megatron goes on as if nothing had happened
        assert changed == 0.0


@pytest.mark.parametrize("layout", ["", ", in a pipeline"])
def test_steps_are_skipped_until_one_can_be_taken(ranks, layout):
    """The first that is taken is that of an engine which begins with this loss scale, to the last bit."""
    for rank, found in enumerate(ranks):
        run = found[f"overflow{layout}"]
        skips = len(run["skipped"])
        assert skips > 2
        assert run["scheduled"] == [0] * skips + [1]
        assert run["scale"][0] == run["scale"][1]
        assert run["count"] == (skips, 0)
        assert run["wrong"] == 0.0
        assert run["moved"] > 0.5
        assert run["rate"][0] == run["rate"][1]
        assert run["taken"] == run["expected"]
        reports = rank == 1 or not layout  # of the last pipeline stage
        assert run["skipped"] == [(math.inf if reports else None, 0.0)] * skips
        assert len(run["texts"]) == (0 if rank else skips)


def test_an_update_of_which_some_mini_batches_are_skipped(ranks):
    """The learning rate goes on, since a step was taken."""
    for found in ranks:
        (first, second), scheduled = found["overflow, some"]
        assert first == math.inf
        assert 0 < second < 100
        assert scheduled == 1


def test_another_failure_of_the_optimizer_is_verls_own(ranks):
    for found in ranks:
        assert found["overflow, another failure"] == NOT_IMPLEMENTED


# ------------------------------------------------------------------------------------------ seeds
def test_without_the_patch_stages_draw_the_same(ranks):
    first, second = (found["seeds, without"] for found in ranks)
    assert first["torch"] == second["torch"] == first["numpy"] == second["numpy"]
    assert first["python"] == second["python"]
    assert torch.equal(first["mask"], second["mask"])


def test_stages_draw_different_numbers_and_calls_do_not_add_up(ranks):
    first, second = (found["seeds"] for found in ranks)
    unpatched = ranks[0]["seeds, without"]
    for name in ("torch", "numpy", "again"):
        assert first[name] == unpatched["torch"]
        assert second[name] == unpatched["torch"] + 100
    assert first["python"] == unpatched["python"] != second["python"]
    assert torch.equal(first["mask"], unpatched["mask"])
    assert 0.2 < (first["mask"] ^ second["mask"]).float().mean() < 0.8


# ------------------------------------------------------------------------------------------ read after a step
@pytest.mark.parametrize("read", READS)
def test_what_is_read_after_a_step_is_of_that_step(ranks, read):
    for found in ranks:
        runs = found["gathered, without and with"]
        if ("with", read) not in runs:
            pytest.skip("this release cannot do it" if read == "shards" else "Megatron-Bridge is not installed")
        old, gathers = runs["without", read]
        fractions, gathers_with_reads = runs["with", read]
        assert all(0.4 < fraction < 0.6 for fraction in old)
        assert fractions == [0.0] * STEPS
        assert gathers_with_reads == gathers  # a forward pass finds nothing left to gather


# ------------------------------------------------------------------------------------------ its own patches
def test_verls_patches_and_ours_stand_side_by_side(ranks):
    for found in ranks:
        others, not_in_place, (alone, *both) = found["together"]
        assert not_in_place == []
        theirs = [target for who, target in others if who.startswith("verl.")]
        assert len(theirs) >= 3
        assert {who.partition(".")[0] for who, _ in others} <= {"verl", "rigs"}  # stand-ins
        for losses, norms, parameters in both:
            assert (losses, norms) == alone[:2]
            assert all(value.equal(alone[2][name]) for name, value in parameters.items())


def test_the_audit_finds_what_the_patches_repair(ranks):
    for found in ranks:
        assert "stages-differ" in found["seeds, without"]["notes"]
        assert "stages-differ" not in found["seeds"]["notes"]
        assert "gathered-when-read" in found.broken["gathered, without and with"]
