"""AReaL's own engine on two ranks: what is wrong or fails without the patches, and what it does with them."""

import pytest
from rigs.areal.engine import RELEASES, STEPS, find_areal, needs_areal
from rigs.areal.runs import READS, cells
from rigs.cells import run_cells
from rigs.megatron.save import minor

pytestmark = needs_areal

OWN = (
    "aux-loss-scale",
    "eval-loss",
    "gathered-when-read",
    "load-optimizer-state",
    "pipeline-seed",
    "weight-sync-resume",
)


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.name)
def ranks(request):
    return run_cells(cells, 2, audited=True, setup=find_areal, env={"AREAL_RELEASE": request.param.folder})


def test_the_patches_are_applied(ranks):
    for found in ranks:
        assert {f"areal.{name}": "applied" for name in OWN}.items() <= found["statuses"].items()
        assert not {"refused", "failed", "overwritten", "missed"} & set(found["statuses"].values())


@pytest.mark.parametrize("reader", READS)
def test_after_a_step_parameters_are_whole(ranks, reader):
    for found in ranks:
        old, _ = found[f"{reader}, without"]
        assert all(0.3 < fraction < 0.8 for fraction in old)
        assert found[f"{reader}, with"] == ([0.0] * STEPS, 0.0)


def test_without_the_patch_a_checkpoint_cannot_be_saved_or_its_moments_are_not_loaded(ranks):
    for found in ranks:
        without = found["recovered, without"]
        if minor() >= 16:
            assert without == ("CheckpointingException", "ShardedTensor.flattened_range is not supported.")
        else:
            assert without[1] == 0


def test_an_evaluations_loss_does_not_depend_on_its_microbatches(ranks):
    for found in ranks:
        whole, halves = found["evaluated, without"]
        assert halves == pytest.approx(whole / 2)
        assert found["evaluated"] == pytest.approx([whole, whole])


def test_moments_and_weights_are_loaded(ranks):
    for found in ranks:
        saved, same, differing = found["recovered"]
        assert saved == same > 0
        assert differing == 0.0


def test_pipeline_stages_are_seeded_differently(ranks):
    assert [found["seeds, without"] for found in ranks] == [[0], [0]]
    assert [found["seeds"] for found in ranks] == [[0], [0, 100]]


def test_without_the_patch_servers_stay_paused_and_the_lock_is_held(ranks):
    found = ranks[0]["failures, without"]
    assert found["update"] == (("ConnectionError", "update"), ["pause", "update"], [], True)
    assert found["disk"] == (("ConnectionError", "disk"), ["pause", "disk"], [], False)


def test_the_audit_finds_that_they_stay_paused(ranks):
    assert ranks[0].broken["failures, without"] == ("resumed",)  # and with the patch nothing, or the cell fails


def test_after_a_failure_servers_continue_and_the_lock_is_free(ranks):
    found = ranks[0]["failures"]
    assert {name: calls for name, (_, calls, _, _) in found.items()} == {
        "pause": ["pause", "continue"],  # some server may have paused
        "update": ["pause", "update", "continue"],
        "continue": ["pause", "update", "continue"],  # it was tried
        "disk": ["pause", "disk", "continue"],
    }
    for name, (failed, _, (text,), held) in found.items():
        assert failed == ("ConnectionError", name)
        assert text.startswith(f"a weight sync failed (ConnectionError: {name})")
        assert not held


def test_auxiliary_losses_are_scaled(ranks):
    for found in ranks:
        off, share = found["router, without"]
        assert off == pytest.approx(share, rel=0.02) and share > 0.5  # as if there were no such losses
        assert found["router"][0] < 0.01


def test_gradients_of_a_dense_model_are_the_same(ranks):
    for found in ranks:
        assert found["dense"].keys() == found["dense, without"].keys()
        for name, gradient in found["dense"].items():
            assert gradient.equal(found["dense, without"][name]), name


def test_another_hook_is_left_alone(ranks):
    for found in ranks:
        assert found["own hook"] == (True, True)


@pytest.mark.parametrize("reader", READS)
def test_the_audit_finds_who_reads_parameters_that_are_not_gathered(ranks, reader):
    for found in ranks:
        assert found.broken[f"{reader}, without"] == ("gathered-when-read",)
