"""SkyRL's own extractors, or its broadcast, read for a weight sync right after a step, by Megatron-Bridge's own
exporter, at two data-parallel ranks: the same as without overlap_param_gather."""

import pytest
from rigs.cells import AUDITED, take_rules
from rigs.megatron.exporters import MODULES, installed
from rigs.megatron.gathers import Collectives, pair, wrong
from rigs.megatron.options import UNPATCHED, buckets
from rigs.skyrl.releases import RELEASES, needs_skyrl
from rigs.skyrl.sync import extractors_of, find_skyrl_and_exporter, syncs_through_bridge

import megapatch
from megapatch.testing import init_parallel

pytestmark = [
    needs_skyrl,
    pytest.mark.skipif(not installed("Megatron-Bridge"), reason="Megatron-Bridge is not installed"),
]

STEPS = 3
THROUGH_BRIDGE = [release for release in RELEASES if syncs_through_bridge(release)]


def read(rank, world_size, release):
    """By extractor: the fraction of the elements that is wrong, by step; and the gathers."""
    init_parallel()
    found = {}
    for index in range(len(extractors_of(release, []))):
        plain, model = pair()
        ((name, whole),) = list(extractors_of(release, plain.chunks).items())[index : index + 1]
        mixed = extractors_of(release, model.chunks)[name]
        fractions = []
        with Collectives().counted() as collectives:
            for step in range(STEPS):
                plain.train_step(step)
                model.train_step(step)
                expected = whole()
                assert len(expected) == len(list(plain.chunks[0].parameters()))
                fractions.append(wrong(mixed(), expected))
            model.forward_backward(forward_only=True)
        found[name] = fractions, collectives.gathers / buckets(model.chunks[0])
    return found, exporter_status(), take_rules()


def exporter_status():
    (site,) = (
        site
        for one in megapatch.report().patches
        for site in one.sites
        if one.patch.name == "megatron.gathered-when-read" and site.module == MODULES["Megatron-Bridge"]
    )
    return site.status.value


@pytest.fixture(scope="module", params=THROUGH_BRIDGE, ids=lambda release: release.name)
def without_and_with(request):
    release, setup = request.param, find_skyrl_and_exporter
    return [release.ranks(read, 2, release, setup=setup, env={**env, **AUDITED}) for env in (UNPATCHED, {})]


def test_a_weight_sync_reads_the_last_step(without_and_with):
    for (before, _, broken), (after, status, rules) in zip(*without_and_with, strict=True):
        assert status == "applied"
        assert (set(broken), rules) == ({"gathered-when-read"}, [])
        for name in before:
            assert all(0.3 < fraction < 0.7 for fraction in before[name][0])
            assert after[name][0] == [0.0] * STEPS


def test_the_next_forward_pass_does_not_gather_again(without_and_with):
    for (before, *_), (after, *_) in zip(*without_and_with, strict=True):
        assert {name: gathers for name, (_, gathers) in after.items()} == {
            name: gathers for name, (_, gathers) in before.items()
        }
