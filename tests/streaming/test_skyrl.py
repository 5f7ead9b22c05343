"""SkyRL's own WorkerDispatch and workers as the parts of a pump: two ranks of Megatron, and FSDP's worker.

Each rank has a pump and a dispatch of its own, whose calls are made in this process; Megatron's workers reduce
over both ranks. The example has real Ray actors.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rigs.megatron.options import attempt
from rigs.skyrl.dispatch import dispatch_for, fsdp_worker_for
from rigs.skyrl.releases import RELEASES, needs_skyrl
from rigs.skyrl.worker import GPT, samples, worker_for

import megapatch
from megapatch.streaming import RolloutBuffer, StreamingConfig, TrainPump
from megapatch.streaming.skyrl import DispatchTrainer, SamplerWeights
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = needs_skyrl

EXAMPLE = Path(__file__).parents[2] / "examples" / "streaming_skyrl.py"
STEPS, GROUPS, SAMPLES = 2, 2, 2  # prompt groups of a step, samples of a group on a rank
# The last release that needs skyrl.accumulate-forward-backward, and those that do not.
TESTED = [release for release in RELEASES if release.name in ("skyrl-0.3.0", "skyrl-0.4.0", "checkout")]
KINDS = ("megatron", "fsdp")


class Client:
    """The inference engines, as far as SkyRL's dispatch asks for them."""

    def __init__(self):
        self.calls = []

    async def pause_generation(self):
        self.calls.append("pause")

    async def resume_generation(self):
        self.calls.append("resume")

    def increment_weight_version(self):
        self.calls.append("next version")


class Trainer(DispatchTrainer):
    """Notes what it returns; `failing` counts down the calls until one gets advantages that are not numbers."""

    failing = 0

    def train_microbatch(self, data):
        self.failing -= 1
        if self.failing == 0:
            data = data[:]
            data["advantages"] = torch.full_like(data["advantages"], float("nan"))
        super().train_microbatch(data)

    def finish_train_step(self):
        self.found = super().finish_train_step()
        return self.found


def made(release, kind):
    """A worker, and a function that returns its parameters and gradients."""
    if kind == "fsdp":
        worker = fsdp_worker_for(release)
        logits = worker.model.logits
        return worker, lambda: (logits.detach().clone(), torch.zeros(()) if logits.grad is None else logits.grad)
    model = tiny_gpt(**GPT)

    def state():
        return [
            torch.cat([value.flatten() for value in of().values()]) for of in (model.parameters, model.gradients)
        ]

    return worker_for(release, model), state


def by_skyrl(release, kind):
    """Steps of one forward_backward each: the metrics and the norm of the last, and the parameters."""
    worker, state = made(release, kind)
    for step in range(STEPS):
        output = worker.forward_backward(samples(release, step, GROUPS * SAMPLES))
        norm = worker.optim_step()
    return output.metrics, norm, state()[0]


def by_pump(release, kind):
    """The same steps, a prompt group at a time; the second group fails at first."""
    worker, state = made(release, kind)
    client = Client()
    worker.broadcast_to_inference_engines = lambda *args, **options: client.calls.append("broadcast")
    trainer = Trainer(dispatch_for(release, worker, client))
    trainer.failing = 2
    weights, buffer = SamplerWeights(trainer.dispatch), RolloutBuffer()
    config = StreamingConfig(generations_per_prompt=1, target_prompt_groups_per_step=GROUPS, max_staleness=STEPS)
    pump = TrainPump(config, trainer, buffer, weights, weights, compute_advantages=lambda claimed: claimed[0])
    batches = [samples(release, step, GROUPS * SAMPLES) for step in range(STEPS)]
    groups = [batch[at : at + SAMPLES] for batch in batches for at in range(0, GROUPS * SAMPLES, SAMPLES)]

    async def train():
        for number, group in enumerate(groups):
            await buffer.put(number, {"group_id": number, "weight_version": 0}, group)
        try:
            await pump.step()
        except ValueError as error:
            failure = str(error), float(state()[1].abs().max()), pump.version
        await pump.run(STEPS)
        return failure

    failure = asyncio.run(train())
    return {
        "failure": failure,
        "metrics": trainer.found,
        "parameters": state()[0],
        "client": client.calls,
        "version": weights.version,
    }


def found_by(rank, world_size, release):
    init_parallel()
    found = {}
    for kind in KINDS:
        metrics, norm, parameters = by_skyrl(release, kind)
        found[kind] = pumped = by_pump(release, kind)
        found[kind]["expected"] = {"loss": metrics["policy_loss"], "norm": norm}
        found[kind]["difference"] = float((pumped.pop("parameters") - parameters).abs().max())
    worker, _ = made(release, "megatron")
    dispatch = dispatch_for(release, worker)
    found["aborted"] = {kind: aborted(release, kind) for kind in KINDS}
    for setting in ("colocate_all", "colocate_policy_ref"):
        found[setting] = attempt(DispatchTrainer, dispatch_for(release, worker, **{setting: True}))
    megapatch.restore()
    found["without"] = attempt(DispatchTrainer(dispatch).begin_train_step)
    return found


def aborted(release, kind):
    """Abort a call twice, and return what is left of it: the largest gradient, and what optim_step would do."""
    worker, state = made(release, kind)
    trainer = DispatchTrainer(dispatch_for(release, worker))
    trainer.begin_train_step()
    trainer.abort_train_step()
    trainer.train_microbatch(samples(release, 0, SAMPLES))
    trainer.abort_train_step()
    trainer.abort_train_step()
    pending = getattr(worker.model, "_pending_grad_sync", None)
    return float(state()[1].abs().max()), pending, worker._micro_batches_accumulated


@pytest.fixture(scope="module", params=TESTED, ids=lambda release: release.name)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(release):
    return release.ranks(found_by, 2, release)


@pytest.mark.parametrize("kind", KINDS)
def test_group_by_group_it_is_skyrls_own_step_also_after_a_failure(ranks, kind):
    for found in ranks:
        assert found[kind]["failure"] == ("an advantage is not a number", 0.0, 0)
        assert found[kind]["difference"] <= 1e-6
        expected = found[kind]["expected"]
        assert found[kind]["metrics"]["policy_loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found[kind]["metrics"]["grad_norm"] == pytest.approx(expected["norm"], rel=1e-5)


def test_skyrl_syncs_weights_with_its_own_pause(ranks):
    for found in ranks:
        assert found["megatron"]["client"] == ["pause", "broadcast", "resume", "next version"] * STEPS
        assert found["megatron"]["version"] == STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_leaves_nothing(ranks, kind):
    assert [found["aborted"][kind] for found in ranks] == [(0.0, None, 0)] * 2


def test_what_would_lose_gradients_is_refused(ranks, release):
    for found in ranks:
        for setting in ("colocate_all", "colocate_policy_ref"):
            kind, text = found[setting]
            assert kind == "MisuseError" and f"placement.{setting}=true" in text
        kind, text = found["without"]
        needed = "run_pending_grad_sync" not in release.file("workers/megatron/megatron_worker").read_text()
        assert kind == ("MisuseError" if needed else None)
        assert not needed or "skyrl.accumulate-forward-backward" in text


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.nightly
def test_the_example_learns():
    env = {**os.environ, "SKYRL_RELEASE": TESTED[-1].folder, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "rigs.skyrl.ray", EXAMPLE]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.1, done.stdout
