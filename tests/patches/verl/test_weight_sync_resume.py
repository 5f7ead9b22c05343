"""verl.weight-sync-resume: verl's own manager, whose sync fails in each place, by each way of calling it."""

import pytest
from rigs.verl.engine import RELEASES, needs_verl
from rigs.verl.sync import CALLS, PLACES, found_by

pytestmark = needs_verl

MANAGED = [release for release in RELEASES if release.has("checkpoint_engine/base.py")]


@pytest.fixture(scope="module", params=MANAGED, ids=lambda release: release.name)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def found(release):
    (found,) = release.ranks(found_by, 1)
    return found


def places_of(release):
    """The replicas' calls of this release."""
    if "release_kv_cache" in release.text("checkpoint_engine/base.py"):
        return PLACES
    renamed = {"release_kv_cache of 1": "sleep of 1", "resume_kv_cache of 1": "wake_up of 1"}
    return [place for place in PLACES if place not in renamed]


def test_it_is_applied_and_taken_back(found):
    assert found["status"] == "applied"
    assert found["restored"]
    assert found["signature"] == "(self, global_steps: int = None)"


@pytest.mark.parametrize("how", CALLS)
def test_a_sync_that_succeeds_is_the_same(found, how):
    assert found["with"][how, None] == found["without"][how, None]
    assert found["with"][how, None]["error"] is None
    assert found["with"][how, None]["serving"] == [True, True]


@pytest.mark.parametrize("how", CALLS)
def test_without_the_patch_replicas_stay_as_they_were_at_the_failure(release, found, how):
    for place in places_of(release):
        outcome = found["without"][how, place]
        assert outcome["error"] == ("Failure", place)
        assert not all(outcome["serving"])
        assert not all(outcome["cache"]) or place in ("abort_all_requests of 1", "resume_generation of 1")


@pytest.mark.parametrize("how", CALLS)
def test_after_a_failure_replicas_serve_again(release, found, how):
    for place in places_of(release):
        outcome = found["with"][how, place]
        assert outcome["error"] == ("Failure", place)  # as without the patch
        lost = place in ("resume_kv_cache of 1", "resume_generation of 1")  # nobody can give the second back
        assert outcome["serving"] == [True, not lost], place
        assert outcome["cache"] == [True, place != "resume_kv_cache of 1"], place


@pytest.mark.parametrize("how", CALLS)
def test_nothing_is_given_back_twice(release, found, how):
    for place in places_of(release):
        for calls in found["with"][how, place]["calls"]:
            assert len(calls) == len(set(calls)), place


def test_a_cancelled_sync_gives_back_as_well(found):
    for outcome in found["with", "cancelled"]:
        assert outcome["error"][0] == "CancelledError"
        assert outcome["serving"] == outcome["cache"] == [True, True]
    assert not all(found["without", "cancelled"][0]["serving"])


def test_so_does_one_that_ctrl_c_ends(found):
    outcome = found["with", "interrupted"]
    assert outcome["error"][0] == "KeyboardInterrupt"
    assert outcome["serving"] == outcome["cache"] == [True, True]
    assert not any(found["without", "interrupted"]["serving"])


def test_a_failed_sync_is_logged(found):
    count, text = found["logged"]
    assert count >= len(CALLS) * 5
    assert "engines may hold a mixture of old and new weights" in text
