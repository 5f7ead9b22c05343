"""skyrl.pause-rollback: the pause of SkyRL's own client, failing and cancelled half way, for each release."""

import functools

from rigs.diagnosed_sources import verdict_of, words
from rigs.skyrl.engines import Engines, cancelled_when, outcome, without_and_with
from rigs.skyrl.findings import found_once, of_those_that_need
from rigs.skyrl.releases import needs_skyrl

from megapatch.patches.skyrl.pause_rollback import MODULES, diagnose

pytestmark = needs_skyrl

NEEDED = ["skyrl_train-0.3.0", "skyrl_train-0.3.1", "skyrl-0.1.0", "checkout-0.4.0-old", "checkout-0.4.0-new"]
FAILURES = {"engine fails": OSError("gone"), "engine cannot": NotImplementedError("no abort")}


def scenarios(release):
    found = {}
    for name, failure in FAILURES.items():
        engines = Engines(release, None, failure)
        first = outcome(engines.client.pause_generation()), engines.told()
        engines[1].failing = None
        again = outcome(engines.client.pause_generation())
        found[name] = {"first": first, "again": again, "then": engines.told()}
    for name, grace in {"cancelled in its grace": 60, "cancelled in abort": 0}.items():
        found[name] = cancelled(Engines(release, grace=grace))
    engines = Engines(release)
    engines.client.generation_paused_event.set()
    found["paused before"] = outcome(engines.client.pause_generation()), engines.marked
    engines = Engines(release)
    found["good"] = outcome(pause_and_resume(engines))
    engines.client.generation_paused_event = None  # as of one that was pickled to a worker
    found["pickled"] = outcome(engines.client.pause_generation())
    return found


def cancelled(engines):
    """In the grace, where there is one, else when engines are asked."""
    in_grace = engines.module.ABORT_GENERATION_GRACE_PERIOD_SECONDS > 0

    def ready():
        return engines.marked if in_grace else engines[0].calls

    return outcome(cancelled_when(engines.client.pause_generation(), ready)), engines.told()


async def pause_and_resume(engines):
    for _ in range(2):
        await engines.client.pause_generation()
        assert engines.marked
        await engines.client.resume_generation()
        assert not engines.marked


def found_by(release, module):
    marked = hasattr(Engines(release).client, "generation_paused_event")
    run = functools.partial(scenarios, release) if marked else dict
    return {"verdict": words(verdict_of(diagnose, module)), **without_and_with("skyrl.pause-rollback", run)}


found_for = found_once(found_by, MODULES)
needed = of_those_that_need(NEEDED, found_for)


def test_without_it_a_failed_pause_marks_the_client_for_good(needed):
    found = needed["without"]
    for name, failure in FAILURES.items():
        assert found[name]["first"][0] == f"{type(failure).__name__}: {failure}"
        assert found[name]["first"][1]["marked"]
        assert "already paused" in found[name]["again"]
    for name in ("cancelled in its grace", "cancelled in abort"):
        assert found[name][0] == "CancelledError"
        assert found[name][1]["marked"]


def test_the_audit_finds_a_client_that_is_marked_for_good(needed):
    for way, rules in {"without": ["resumed"], "with": []}.items():
        for name in FAILURES:
            assert needed[way][name]["first"][1]["rules"] == rules
        for name in ("cancelled in its grace", "cancelled in abort"):
            assert needed[way][name][1]["rules"] == rules


def test_with_it_the_client_is_not_marked_and_the_next_pause_works(needed):
    for name in FAILURES:
        found = needed["with"][name]
        assert found["first"][0] == needed["without"][name]["first"][0]
        assert not found["first"][1]["marked"]
        assert found["first"][1]["serving"] == [True, True]
        assert found["again"] is None
        assert found["then"]["marked"]
    for name in ("cancelled in its grace", "cancelled in abort"):
        error, told = needed["with"][name]
        assert error == "CancelledError"
        assert not told["marked"]
        assert any(told["engine calls"]) == (name == "cancelled in abort")


def test_all_else_is_as_it_was(needed):
    for name in ("paused before", "good", "pickled"):
        assert needed["with"][name] == needed["without"][name]
    error, marked = needed["with"]["paused before"]
    assert "already paused" in error
    assert marked
    assert needed["with"]["good"] is None
