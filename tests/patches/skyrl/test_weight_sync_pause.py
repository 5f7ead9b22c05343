"""skyrl.weight-sync-pause: SkyRL's own WorkerDispatch and client, between a broadcast and engines that are ours.

No wheel has the defect: where one has the dispatch and the client, its fixed method gives way to an imitation of
the former one. A checkout that has the defect is tested as it is.
"""

from unittest import mock

import pytest
from rigs.diagnosed_sources import verdict_of, words
from rigs.releases import status_of
from rigs.skyrl.engines import (
    Engines,
    cancelled_when,
    logged,
    outcome,
    save_without_pause,
    without_and_with,
)
from rigs.skyrl.findings import found_once
from rigs.skyrl.releases import RELEASES, has_correctness_fixes, needs_skyrl

import megapatch
from megapatch.patches.skyrl.weight_sync_pause import MODULES, SAVE, diagnose

pytestmark = needs_skyrl

PATCH = "skyrl.weight-sync-pause"


HAVING_BOTH = [
    one for one in RELEASES if one.has("workers/worker_dispatch", "inference_engines/inference_engine_client")
]


def imitated(release):
    return has_correctness_fixes(release)


class Policy:
    """A group of actors."""

    def __init__(self, engines):
        self.engines = engines

    def async_run_ray_method(self, how, name, *args):
        assert name == "broadcast_to_inference_engines"
        self.engines.broadcast()

    def offload_to_cpu(self, **what):
        self.engines.calls.append("offload")

    def backload_to_gpu(self, **what):
        self.engines.calls.append("backload")


def dispatch_for(module, engines, colocated=False):
    config = mock.MagicMock()
    config.trainer.placement.colocate_all = config.trainer.placement.colocate_policy_ref = colocated
    return module.WorkerDispatch(
        config, policy_actor_group=Policy(engines), inference_engine_client=engines.client
    )


def scenarios(release, module):
    found = {}

    def sync(name, engines, dispatch=None, times=1):
        dispatch = dispatch or dispatch_for(module, engines)
        with logged() as records:
            errors = [outcome(dispatch.save_weights_for_sampler()) for _ in range(times)]  # each in its own loop
        found[name] = {"errors": errors, "log": records, **engines.told()}

    sync("good", Engines(release), times=2)

    engines = Engines(release)
    engines.failing_broadcasts = (1,)
    sync("broadcast fails", engines, times=2)

    engines = Engines(release)
    if engines.marked is not None:
        outcome(engines.client.pause_generation())
        engines.calls.clear()
        sync("paused before", engines)
        engines = Engines(release, grace=60)
        with logged() as records:
            saving = dispatch_for(module, engines).save_weights_for_sampler()
            error = outcome(cancelled_when(saving, lambda: engines.marked or engines.broadcasts))
        found["cancelled"] = {"errors": [error], "log": records, **engines.told()}

    engines = Engines(release)
    sync("colocated", engines, dispatch_for(module, engines, colocated=True))

    engines = Engines(release)
    dispatch = dispatch_for(module, engines)
    dispatch._inference_engine_client = None
    sync("no client", engines, dispatch)
    return found


def found_by(release, module):
    """The verdict and what becomes of the release's own method; then the scenarios, where there can be some."""
    found = {"verdict": words(verdict_of(diagnose, module)), "of its own": status_of(PATCH)}
    if release not in HAVING_BOTH:
        return found
    if imitated(release):
        setattr(module.WorkerDispatch, SAVE, save_without_pause)
    megapatch.apply()
    return {**found, **without_and_with(PATCH, lambda: scenarios(release, module))}


found_for = found_once(found_by, MODULES)


@pytest.fixture(
    params=HAVING_BOTH, ids=lambda one: f"{'imitation in ' if imitated(one) else ''}{one.name}", scope="module"
)
def needed(request):
    found = found_for(request.param)
    if request.param.name == "checkout" and found["verdict"][0] != "needed":
        pytest.skip("this checkout does not need it")
    return found


def errors(log):
    return [text for level, text in log if level == "ERROR"]


def resumed(found):
    return found["marked"] in (False, None) and found["serving"] == [True, True]


@pytest.fixture
def patched(needed):
    assert needed["status"] == "applied"
    return needed["with"]


def test_without_it_requests_see_a_mixture(needed):
    for name in ("good", "broadcast fails"):
        assert needed["without"][name]["seen mixed"]
        assert "pause" not in needed["without"][name]["calls"]


def test_generation_is_paused_while_weights_are_synced(patched):
    found = patched["good"]
    assert found["errors"] == [None, None]
    assert found["calls"] == ["pause", "broadcast", "resume"] * 2
    assert found["synced"] and not found["seen mixed"]
    assert resumed(found)
    assert found["log"] == []


def test_after_a_sync_that_failed_it_is_resumed_and_said(patched):
    """The next one is good, and so are the weights after it."""
    found = patched["broadcast fails"]
    assert found["errors"] == ["BroadcastFailed", None]
    assert found["calls"] == ["pause", "broadcast", "resume"] * 2
    assert resumed(found)
    (error,) = errors(found["log"])
    assert "mixture of old and new weights" in error
    assert found["synced"]


def test_what_the_caller_has_paused_stays_paused(needed, patched):
    if found := patched.get("paused before"):
        assert found["calls"] == ["broadcast"]
        assert found["marked"] and not found["seen mixed"]
        assert found["errors"] == [None]
    else:  # a client without a mark
        assert patched["good"]["marked"] is None


def test_a_pause_that_is_cancelled_is_undone_and_nothing_is_synced(patched):
    if found := patched.get("cancelled"):
        assert found["errors"] == ["CancelledError"]
        assert found["calls"] == ["pause"]
        assert resumed(found)


def test_the_colocated_path_is_untouched(needed, patched):
    assert patched["colocated"] == needed["without"]["colocated"]
    assert "pause" not in patched["colocated"]["calls"]
    assert patched["colocated"]["engine calls"] == [["wake up ['weights']", "wake up ['kv_cache']"]] * 2


def test_without_a_client_the_error_is_skyrls(needed, patched):
    assert patched["no client"] == needed["without"]["no client"]
    assert "no inference_engine_client" in patched["no client"]["errors"][0]
