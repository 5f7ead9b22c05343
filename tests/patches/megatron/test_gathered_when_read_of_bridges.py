"""megatron.gathered-when-read in the exporters of Megatron-Bridge, mbridge and mcore-bridge, at 2 ranks."""

from functools import partial

import pytest
from rigs.cells import cells_of
from rigs.megatron.exporters import MODULES, find_exporters, installed, stream
from rigs.megatron.gathers import Collectives, pair, wrong
from rigs.megatron.options import UNPATCHED, buckets

import megapatch
from megapatch.patch import Status
from megapatch.testing import init_parallel

STEPS = 3
EXPORTERS = [name for name in MODULES if installed(name)]
pytestmark = pytest.mark.skipif(not EXPORTERS, reason="no exporter is installed")


def streams(name):
    """By step: the fraction that is wrong of a stream made before the step and read after it; and the gathers."""
    plain, model = pair()
    expected = []
    for step in range(STEPS):
        plain.train_step(step)
        expected.append(plain.chunks[0].module.state_dict())
        expected[-1] = {key: value.clone() for key, value in expected[-1].items() if value is not None}
    found = []
    with Collectives().counted() as counted:
        for step in range(STEPS):
            made = stream(name, model.chunks)
            model.train_step(step)
            read = {key.removeprefix("module."): tensor.clone() for key, tensor in made}
            found.append(wrong(read, {key: expected[step][key] for key in read}))
            assert len(read) == len(list(model.chunks[0].parameters()))
        model.forward_backward(forward_only=True)
    return found, counted.gathers / buckets(model.chunks[0])


def job(rank, world_size):
    init_parallel()
    for name in EXPORTERS:
        yield name, partial(streams, name)
    statuses = {
        site.module: site.status
        for one in megapatch.report().patches
        if one.patch.name == "megatron.gathered-when-read"
        for site in one.sites
    }
    yield "statuses", lambda: {name: statuses[MODULES[name]] for name in EXPORTERS}


without = cells_of(job, 2, setup=find_exporters, env=UNPATCHED)
ranks = cells_of(job, 2, setup=find_exporters)


@pytest.mark.parametrize("name", EXPORTERS)
def test_streams_are_those_of_a_run_without_overlap(without, ranks, name):
    for before, after in zip(without, ranks, strict=True):
        assert all(0.4 < fraction < 0.6 for fraction in before[name][0])
        assert after[name] == ([0] * STEPS, STEPS + 1)
        assert before[name][1] == STEPS + 1
        assert after["statuses"][name] is Status.APPLIED
