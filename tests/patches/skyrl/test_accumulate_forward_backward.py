"""skyrl.accumulate-forward-backward: SkyRL's own worker and model wrapper around a real model and optimizer, at 2
ranks, for each release that has the two calls."""

import importlib
from unittest import mock

import pytest
import torch
from rigs.cells import AUDITED, take_rules
from rigs.diagnosed_sources import verdict_of
from rigs.megatron.options import ADAM, Interrupted, assert_same_parameters, attempt
from rigs.releases import status_of
from rigs.skyrl.releases import needs_skyrl
from rigs.skyrl.worker import GPT, LENGTH, RESPONSE, samples, worker_for

from megapatch import apply, audit, restore
from megapatch.patches.skyrl.accumulate_forward_backward import MODULES, diagnose
from megapatch.testing import init_parallel, tiny_gpt

pytestmark = needs_skyrl

SAMPLES = 4
CUTS = {"two": (2, 2), "three": (1, 1, 2), "uneven": (1, 3)}
SHARDED = {**ADAM, "use_distributed_optimizer": True}
OPTIONS = {"plain": {}, "sharded": SHARDED, "overlap": {**SHARDED, "overlap_grad_reduce": True}}
STEPS = 2
FP16 = {"dtype": "fp16", "loss_scale": 64.0, "optim": {"loss_scale_window": 4}}


def calls(worker, release, step, cut, between=lambda worker, batch: None):
    batch, at = samples(release, step, SAMPLES), 0
    for size in cut:
        piece = batch[at : at + size]
        worker.forward_backward(piece)
        between(worker, batch)
        at += size


def trained(release, options, cut, between=lambda worker, batch: None):
    """By step: norm, gradients, parameters."""
    model = tiny_gpt(**GPT, **options)
    worker = worker_for(release, model)
    config = dict(vars(model.config))
    found = []
    for step in range(STEPS):
        calls(worker, release, step, cut, between)
        norm = worker.optim_step()
        found.append((norm, model.gradients(), model.parameters()))
    assert vars(model.config) == config
    return found


def forward_only(worker, batch):
    """The log-probabilities of the model as it is, and the losses alone where there is a call for them."""
    piece = batch[0:1]
    attended = piece["attention_mask"]
    positions = (attended.cumsum(-1) - 1).masked_fill(attended == 0, 0)
    one = {
        "sequences": piece["sequences"],
        "attention_mask": attended,
        "position_ids": positions,
        "num_actions": RESPONSE,
    }
    with torch.no_grad():
        worker.model.forward([one], seq_len=LENGTH, micro_batch_size=1)


def last_alone(release, options):
    """Return the part of a step in the pieces "uneven" that the defect leaves."""
    model = tiny_gpt(**GPT, **options)
    worker = worker_for(release, model)
    worker.forward_backward(samples(release, 0, SAMPLES)[1:])
    return worker.optim_step()


def differences(found, expected):
    """The largest of norms, gradients and parameters, relative to the largest value."""
    largest = 0.0
    for (norm, *states), (expected_norm, *expected_states) in zip(found, expected, strict=True):
        largest = max(largest, abs(norm - expected_norm) / expected_norm)
        for state, expected_state in zip(states, expected_states, strict=True):
            assert state.keys() == expected_state.keys()
            for name, value in expected_state.items():
                largest = max(largest, float((state[name] - value).abs().max() / value.abs().max()))
    return largest


def with_errors(release):
    """A call that raises, what is refused, and that the window after it is a fresh one."""
    model, reference = tiny_gpt(**GPT), tiny_gpt(**GPT)
    worker, other = worker_for(release, model), worker_for(release, reference)
    batch = samples(release, 0, SAMPLES)
    found = {}
    worker.forward_backward(batch[:1])
    found["offload"] = attempt(worker.offload_to_cpu)
    found["offload the model alone"] = attempt(worker.offload_to_cpu, offload_optimizer=False)
    broken = batch[1:]
    broken["advantages"] = broken["advantages"].clone()
    broken["advantages"][-1] = float("nan")
    found["call"] = attempt(worker.forward_backward, broken)
    worker.forward_backward(batch[:1])
    found["no loss"] = attempt(worker.forward_backward, None)  # raises before the schedule
    found["step after that"] = attempt(worker.optim_step)
    worker.forward_backward(batch[:1])
    attempt(worker.forward_backward, broken)
    found["gradients"] = max(float(gradient.abs().max()) for gradient in model.gradients().values())
    found["shadows"] = "forward_backward_mini_batch" in vars(worker.model) or any(
        "zero_grad_buffer" in vars(chunk) for chunk in model.chunks
    )
    found["step"] = attempt(worker.optim_step)
    calls(worker, release, 1, CUTS["two"])
    found["norms"] = worker.optim_step(), (calls(other, release, 1, (SAMPLES,)), other.optim_step())[1]
    assert_same_parameters(model.parameters(), reference.parameters())
    found["step without a call"] = attempt(worker.optim_step)
    return found


def with_an_optimizer_that_raises(release):
    """Return the loss scale's growth count and the error of a retry, after an optim_step whose optimizer raises;
    and whether the next step is that of a worker without it."""
    found = []
    for raises in (True, False):
        model = tiny_gpt(**GPT, **FP16)
        worker = worker_for(release, model)
        calls(worker, release, 0, CUTS["two"])
        worker.optim_step()
        if raises:
            calls(worker, release, 1, CUTS["two"])
            with mock.patch.object(model.optimizer, "step_with_ready_grads", side_effect=Interrupted):
                error, _ = attempt(worker.optim_step)
            retry = attempt(worker.optim_step)
            zeroed = not any(gradient.any() for gradient in model.gradients().values())
        calls(worker, release, 2, CUTS["two"])
        norm = worker.optim_step()
        scaler = getattr(model.optimizer, "chained_optimizers", [model.optimizer])[0].grad_scaler
        found.append((norm, scaler._growth_tracker, float(scaler.scale)))
    return error, retry, zeroed, found


def with_adapters(release):
    """The real store of adapters, whose whole model is one: two windows at once. By adapter, the norm and what it
    is for one alone in one call."""
    name = f"{release.backend}.workers.megatron.adapter_store"
    try:
        store = importlib.import_module(name)
    except ModuleNotFoundError:
        return None
    worker = worker_for(release, tiny_gpt(**GPT, **SHARDED))
    signature = store.LoraSignature(1, 1, (), "lora", 1, 1, 1)
    with (
        mock.patch.object(store, "_new_pinned_like", lambda tensor: torch.empty_like(tensor)),  # takes a GPU
        mock.patch.object(store, "_expected_lora_param_check"),
    ):
        worker.adapter_store = store.AdapterStore()
        worker.adapter_store.register_pristine(worker.actor_module, worker.optimizer, signature)
        for adapter in "ab":
            worker.register_adapter(adapter)
        first, second = samples(release, 0, SAMPLES), samples(release, 1, SAMPLES)
        worker.swap_to_adapter("a")
        worker.forward_backward(first[:1])
        worker.swap_to_adapter("b")
        worker.forward_backward(second[:2])
        worker.swap_to_adapter("a")
        worker.forward_backward(first[1:])
        worker.swap_to_adapter("b")
        worker.forward_backward(second[2:])
        norms = {"b": worker.optim_step()}
        worker.swap_to_adapter("a")
        norms["a"] = worker.optim_step()
    for adapter, batch in (("a", first), ("b", second)):
        alone = worker_for(release, tiny_gpt(**GPT, **SHARDED))
        alone.forward_backward(batch)
        norms[adapter] = norms[adapter], alone.optim_step()
    return norms


def found_by(rank, world_size, release):
    init_parallel()
    module = release.module_of(MODULES)
    found = {
        "verdict": verdict_of(diagnose, module).kind.value,
        "status": status_of("skyrl.accumulate-forward-backward"),
    }
    if found["status"] != "applied":
        return found
    found["rules with"], found["rules without"] = [], []
    for name, options in OPTIONS.items():
        one = trained(release, options, (SAMPLES,))
        for cut, sizes in CUTS.items():
            found[name, cut] = differences(trained(release, options, sizes), one)
        between = trained(release, options, CUTS["three"], forward_only)
        found[name, "forward only"] = differences(between, one)
        found["rules with"] += take_rules()
        restore()
        found[name, "one call without"] = differences(one, trained(release, options, (SAMPLES,)))
        found[name, "without"] = (
            trained(release, options, CUTS["uneven"])[0][0],
            last_alone(release, options),
            one[0][0],
        )
        found["rules without"].append({note.rule for note in audit.notes()})
        audit.clear()
        apply()
    found["errors"] = with_errors(release)
    found["raises"] = with_an_optimizer_that_raises(release)
    found["adapters"] = with_adapters(release)
    return found


@pytest.fixture(scope="module")
def ranks(release):
    return release.ranks(found_by, 2, release, env=AUDITED)


@pytest.fixture
def repaired(release, ranks):
    if kind_of(release) != "needed":
        pytest.skip("not needed")
    return ranks


def kind_of(release):
    """By the text of its files, which no diagnosis looks at."""
    text = release.file("workers/megatron/megatron_worker").read_text()
    if "def forward_backward" not in text:
        return "absent"
    return "fixed" if "run_pending_grad_sync" in text else "needed"


def test_verdict(release, ranks):
    kind = kind_of(release)
    for found in ranks:
        assert found["verdict"] == kind
        assert found["status"] == ("applied" if kind == "needed" else "not-needed")


@pytest.mark.parametrize("cut", [*CUTS, "forward only"])
@pytest.mark.parametrize("options", OPTIONS)
def test_several_calls_give_the_gradient_of_one(repaired, options, cut):
    for found in repaired:
        assert found[options, cut] <= 1e-5


@pytest.mark.parametrize("options", ["plain", "sharded"])
def test_without_it_the_last_call_is_all_there_is(repaired, options):
    for found in repaired:
        several, last, all_of_them = found[options, "without"]
        assert several == pytest.approx(last, rel=1e-6)
        assert several != pytest.approx(all_of_them, rel=1e-2)


def test_the_audit_finds_steps_of_which_the_last_call_is_all_there_is(repaired):
    for found in repaired:
        assert found["rules with"] == []
        assert all("gradients-dropped" in rules for rules in found["rules without"])


@pytest.mark.parametrize("options", OPTIONS)
def test_one_call_is_what_it_was(repaired, options):
    for found in repaired:
        assert found[options, "one call without"] <= 1e-6


def test_errors(repaired):
    for found in repaired:
        errors = found["errors"]
        kind, text = errors["offload"]
        assert kind == "MisuseError"
        assert text == "offload_to_cpu() would lose the gradients of forward_backward: call optim_step() first"
        assert errors["offload the model alone"] == (None, None)
        assert errors["call"] == ("ValueError", "an advantage is not a number")
        assert errors["gradients"] == 0.0
        assert not errors["shadows"]
        assert errors["no loss"][0] not in (None, "MisuseError")
        for name in ("step", "step after that"):
            kind, text = errors[name]
            assert kind == "MisuseError"
            assert "the gradients of those before it were dropped" in text
        assert errors["step without a call"][0] is None  # as without the patch
        assert errors["norms"][0] == pytest.approx(errors["norms"][1], rel=1e-6)


def test_an_optimizer_that_raises_leaves_nothing(repaired):
    for found in repaired:
        error, (retry, text), zeroed, (with_error, without) = found["raises"]
        assert error == Interrupted.__name__
        assert retry == "MisuseError"
        assert "a forward_backward() or optim_step() has raised" in text
        assert zeroed
        assert with_error == without


def test_each_adapter_has_its_window(repaired):
    for found in repaired:
        adapters = found["adapters"]
        if adapters is None:
            pytest.skip("this release has no store of adapters")
        for norm, alone in adapters.values():
            assert norm == pytest.approx(alone, rel=1e-6)
