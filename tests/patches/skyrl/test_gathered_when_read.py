"""skyrl.gathered-when-read: SkyRL's own checkpoints right after a step, at two data-parallel ranks, compared with
those of a model without overlap_param_gather."""

import pytest
from rigs.cells import AUDITED, take_rules
from rigs.diagnosed_sources import verdict_of
from rigs.megatron.gathers import Collectives, pair, wrong
from rigs.megatron.options import UNPATCHED, buckets
from rigs.releases import status_of
from rigs.skyrl.releases import needs_skyrl
from rigs.skyrl.save import Saves

from megapatch.patches.skyrl.gathered_when_read import SAVE
from megapatch.testing import init_parallel

pytestmark = needs_skyrl

STEPS = 3


def saved(rank, world_size, release):
    """By step: the fraction of the elements that is wrong; and the gathers that the forward passes make."""
    init_parallel()
    plain, model = pair()
    save, found = Saves(release), []
    with Collectives().counted() as collectives:
        for step in range(STEPS):
            plain.train_step(step)
            model.train_step(step)
            found.append(wrong(save(model), save(plain)))
    return {
        "wrong": found,
        "gathers": (collectives.gathers, sum(buckets(chunk) for chunk in model.chunks)),
        "status": status_of("skyrl.gathered-when-read"),
        "verdict": verdict_of(SAVE.diagnose, save.module).kind.value,
        "rules": take_rules(),
    }


@pytest.fixture(scope="module")
def with_and_without(release):
    return [release.ranks(saved, 2, release, env={**env, **AUDITED}) for env in ({}, UNPATCHED)]


def test_a_checkpoint_holds_the_last_step(with_and_without):
    for found in with_and_without[0]:
        assert found["status"] == "applied"
        assert found["verdict"] == "needed"
        assert found["wrong"] == [0.0] * STEPS


def test_without_the_patch_half_of_it_is_old(with_and_without):
    for found in with_and_without[1]:
        assert found["verdict"] == "needed"
        assert all(fraction > 0.3 for fraction in found["wrong"])


def test_the_audit_finds_what_is_read_too_early(with_and_without):
    assert [[found["rules"] for found in ranks] for ranks in with_and_without] == [
        [[], []],
        [["gathered-when-read"]] * 2,
    ]


def test_a_save_gathers_in_place_of_the_next_forward_pass(with_and_without):
    for found, plain in zip(*with_and_without, strict=True):
        gathers, buckets_of_model = found["gathers"]
        assert gathers - plain["gathers"][0] == buckets_of_model  # of the last save, which no forward pass follows
