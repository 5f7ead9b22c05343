"""skyrl.async-trainer-resume: train() of SkyRL's own FullyAsyncRayPPOTrainer, whose syncs fail, and SkyRL's own
client, for each release. Models, data and samples are ours."""

import asyncio
import contextlib
import functools
from unittest import mock

import pytest
from rigs.diagnosed_sources import verdict_of, words
from rigs.skyrl.engines import STEPS, Engines, logged, outcome, trainer_for, without_and_with
from rigs.skyrl.findings import found_once, of_those_that_need
from rigs.skyrl.releases import needs_skyrl

from megapatch.patches.skyrl.async_trainer_resume import MODULES, SYNC, diagnose

pytestmark = needs_skyrl

NEEDED = [
    "skyrl_train-0.3.0",
    "skyrl_train-0.3.1",
    "skyrl-0.1.0",
    "skyrl-0.2.0",
    "checkout-0.4.0-old",
    "checkout-0.4.0-new",
]
FAILING = {"first": 1, "second": 2, "last": STEPS + 1}  # of the syncs of a train()


def scenarios(release, module):
    found = {}

    def run(name, run_it, failing=(), resume=None):
        engines = Engines(release)
        engines.failing_broadcasts = failing
        if resume is not None:
            engines.client.resume_generation = resume
        with logged() as records:
            error = outcome(run_it(trainer_for(module, engines), engines))
        told = engines.told()
        error = (
            None if "Unexpected number of consumed data" in str(error) else error
        )  # 0.3.0 at the end of an epoch
        again = outcome(engines.client.pause_generation())  # whether another sync could begin
        found[name] = {"error": error, "log": records, "again": again, **told}

    async def train(trainer, engines):
        await trainer.train()

    async def train_cancelled(trainer, engines):
        async def cancelled():
            if engines.broadcasts == 2:
                task.cancel()
                await asyncio.sleep(60)

        engines.between = cancelled
        task = asyncio.ensure_future(trainer.train())
        await task

    async def sync_alone(trainer, engines):
        await getattr(trainer, SYNC)()

    async def train_then_sync_alone(trainer, engines):
        with contextlib.suppress(AssertionError):  # of 0.3.0, see above
            await trainer.train()
        engines.failing_broadcasts = (engines.broadcasts + 1,)
        await engines.client.pause_generation()
        await getattr(trainer, SYNC)()

    run("good", train)
    for name, number in FAILING.items():
        run(name, train, failing=(number,))
    run("cancelled", train_cancelled)
    resume = mock.AsyncMock(side_effect=OSError("no resume"))
    run("both fail", train, failing=(2,), resume=resume)
    found["both fail"]["resumes"] = resume.await_count
    run("sync alone", sync_alone, failing=(1,))
    run("sync alone, after train()", train_then_sync_alone)
    return found


def found_by(release, module):
    verdict = verdict_of(diagnose, module)
    run = functools.partial(scenarios, release, module) if verdict.kind.value == "needed" else dict
    return {"verdict": words(verdict), **without_and_with("skyrl.async-trainer-resume", run)}


found_for = found_once(found_by, MODULES)


needed = of_those_that_need(NEEDED, found_for)


def test_without_it_generation_stays_paused(needed):
    for name in ("second", "last", "cancelled"):
        found = needed["without"][name]
        assert found["calls"][-2:] == ["pause", "broadcast"]
        assert found["serving"] == [False, False]
        if found["marked"] is not None:
            assert found["marked"]
            assert "already paused" in found["again"]


@pytest.mark.parametrize("name", ["second", "last", "cancelled"])
def test_with_it_one_resume_follows(needed, name):
    found = needed["with"][name]
    assert found["error"] == ("CancelledError" if name == "cancelled" else "BroadcastFailed")
    syncs = {"second": 1, "last": STEPS, "cancelled": 1}[name]
    assert found["calls"] == ["broadcast"] + ["pause", "broadcast", "resume"] * syncs
    assert found["serving"] == [True, True]
    assert not found["marked"]
    assert found["again"] is None
    ((level, text),) = found["log"]
    assert level == "ERROR"
    assert "mixture of old and new weights" in text


def test_the_first_sync_and_those_that_are_good_stay_as_they_are(needed):
    for name in ("good", "first", "sync alone", "sync alone, after train()"):
        assert needed["with"][name] == needed["without"][name], name
    patched = needed["with"]
    assert patched["good"]["error"] is None
    assert patched["good"]["calls"] == ["broadcast"] + ["pause", "broadcast", "resume"] * STEPS
    assert patched["first"]["calls"] == ["broadcast"]


def test_the_audit_finds_generation_that_stays_paused(needed):
    found = {way: needed[way] for way in ("without", "with")}
    broken = {way: {name for name, one in found[way].items() if set(one["rules"]) == {"resumed"}} for way in found}
    assert all(set(one["rules"]) <= {"resumed"} for way in found for one in found[way].values())
    still = {"both fail", "sync alone, after train()"}  # a resume that fails, and a pause of the caller's own
    assert broken == {"without": {"second", "last", "cancelled", *still}, "with": still}


def test_a_resume_that_fails_hides_nothing(needed):
    found = needed["with"]["both fail"]
    assert found["error"] == "BroadcastFailed"
    assert found["resumes"] == 1
    assert any("no resume" in text for level, text in found["log"] if level == "ERROR")
