"""gathered_parameters() on the real DistributedDataParallel and distributed optimizer, without patches."""

from types import SimpleNamespace
from unittest import mock

import pytest
from rigs.cells import cells_of
from rigs.megatron.gathers import Collectives, between_ranks, no_collective, pair, state_of, unwrapped, wrong
from rigs.megatron.options import UNPATCHED, assert_misuse, attempt, buckets

from megapatch import MisuseError
from megapatch.testing import init_parallel, tiny_gpt
from megapatch.weight_sync import gathered_parameters

STEPS = 3
HANDLES = {
    "wrapped": lambda model: model.chunks[0],
    "lists of lists": lambda model: (model.chunks, [model.chunks]),
    "unwrapped": lambda model: unwrapped(model.chunks[0]),
    "a part": lambda model: unwrapped(model.chunks[0]).decoder,
}


# ------------------------------------------------------------------------------------------ what the ranks do
def compare_after_steps(handle, **more):
    """By step: the fraction that is wrong before and after, and that differs between ranks before."""
    plain, model = pair(**more)
    found = []
    for step in range(STEPS):
        plain.train_step(step)
        model.train_step(step)
        before = wrong(model.parameters(), plain.parameters()), between_ranks(model.parameters())
        gathered_parameters(handle(model))
        found.append((*before, wrong(model.parameters(), plain.parameters()), state_of(model)))
    return found


def read_before_the_step(after_a_read):
    """A read between the last backward pass and the step must leave the shards of that step to be gathered."""
    plain, model = pair()
    for step in range(STEPS):
        plain.train_step(step)
        model.zero_grad()
        model.forward_backward(step)
        old = wrong(model.parameters(), plain.parameters())
        with gathered_parameters(model.chunks):
            assert wrong(model.parameters(), plain.parameters()) == old
        model.optimizer.step()
        if after_a_read:
            gathered_parameters(model.chunks)
            assert wrong(model.parameters(), plain.parameters()) == 0
    gathered_parameters(model.chunks)
    return wrong(model.parameters(), plain.parameters())


def entered_after_the_step():
    """Made before the step, entered after it."""
    plain, model = pair()
    made = gathered_parameters(model.chunks)
    plain.train_step()
    model.train_step()
    with made as given:
        assert given is model.chunks
        return wrong(model.parameters(), plain.parameters())


def waits_for_what_is_under_way():
    plain, model = pair()
    plain.train_step()
    model.train_step()
    model.chunks[0].start_param_sync()
    assert all(state == (True, True) for state in state_of(model))
    with no_collective():
        gathered_parameters(model.chunks)
    assert all(state == (False, True) for state in state_of(model))
    return wrong(model.parameters(), plain.parameters())


def no_collective_where_nothing_is_pending():
    plain, model = pair()
    for trained in (plain, model):
        trained.train_step()
    model.forward_backward(forward_only=True)
    bare = unwrapped(tiny_gpt().chunks[0])
    for parameter in bare.parameters():
        del parameter.main_grad  # as if it had never been wrapped
    with no_collective():
        for nothing_to_do in (plain.chunks, model.chunks, unwrapped(model.chunks[0]), bare, []):
            gathered_parameters(nothing_to_do)
    return "none"


def gathers():
    """The parameter gathers of three steps, the forward pass after them included, by number of reads a step."""
    found = {}
    for reads in (0, 1, 2):
        _, model = pair()
        with Collectives().counted() as counted:
            for step in range(STEPS):
                model.train_step(step)
                for _ in range(reads):
                    gathered_parameters(model.chunks)
            model.forward_backward(forward_only=True)
        found[reads] = counted.gathers / buckets(model.chunks[0])
    return found


def refusals():
    _, model = pair()
    model.train_step()
    (chunk,) = model.chunks
    found, config = {}, chunk.ddp_config
    with no_collective():
        if hasattr(config, "reuse_grad_buf_for_mxfp8_param_ag"):
            with mock.patch.object(config, "reuse_grad_buf_for_mxfp8_param_ag", True):
                found["mxfp8"] = attempt(gathered_parameters, chunk)
        with mock.patch.object(config, "use_distributed_optimizer", False):
            found["layer-wise"] = attempt(gathered_parameters, chunk)
        storage = mock.Mock(return_value=SimpleNamespace(size=lambda: 0))
        with mock.patch.object(
            chunk.bucket_groups[-1].buckets[0], "param_data", SimpleNamespace(untyped_storage=storage)
        ):
            found["offloaded"] = attempt(gathered_parameters, chunk)
    found["nothing begun"] = state_of(model)
    return found


def job(rank, world_size):
    init_parallel()
    for name, handle in HANDLES.items():
        yield name, lambda handle=handle: compare_after_steps(handle)
    yield "bf16", lambda: compare_after_steps(HANDLES["unwrapped"], dtype="bf16")
    yield "before the step", lambda: read_before_the_step(after_a_read=False)
    yield "before the step and after it", lambda: read_before_the_step(after_a_read=True)
    yield "entered later", entered_after_the_step
    yield "under way", waits_for_what_is_under_way
    yield "nothing pending", no_collective_where_nothing_is_pending
    yield "gathers", gathers
    yield "refusals", refusals


ranks = cells_of(job, 2, env=UNPATCHED)


# ------------------------------------------------------------------------------------------ the tests
@pytest.mark.parametrize("name", [*HANDLES, "bf16"])
def test_parameters_are_those_of_a_run_without_overlap(ranks, name):
    least = 0.5 if name == "bf16" else 0.9  # some of an update rounds to nothing
    for found in ranks:
        for before, apart, after, _ in found[name]:
            assert least / 2 - 0.05 < before < 0.55  # the other rank's half is old
            assert apart > least
            assert after == 0
    states = [[state for *_, state in found[name]] for found in ranks]
    assert states[0] == states[1]


@pytest.mark.parametrize("name", ["before the step", "before the step and after it", "entered later", "under way"])
def test_reads_at_other_moments(ranks, name):
    assert [found[name] for found in ranks] == [0, 0]


def test_no_collective_where_nothing_is_pending(ranks):
    assert [found["nothing pending"] for found in ranks] == ["none", "none"]


def test_every_read_gathers_at_most_once_a_bucket(ranks):
    """Without the patch no one knows of the step, so the forward pass after a read gathers again."""
    for found in ranks:
        assert found["gathers"] == {0: STEPS + 1, 1: 2 * STEPS + 1, 2: 3 * STEPS + 1}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mxfp8", "the buffer to gather from is the gradients'"),
        ("layer-wise", "disable_forward_pre_hook"),
        ("offloaded", "before offloading"),
    ],
)
def test_what_cannot_be_gathered_is_refused_before_any_collective(ranks, name, words):
    for found in ranks:
        if name not in found["refusals"]:
            pytest.skip("this Megatron has no such option (0.12)")
        assert_misuse(found["refusals"][name], "the last optimizer step are not gathered yet", words)
        assert not any(dispatched for _, dispatched in found["refusals"]["nothing begun"])


@pytest.mark.parametrize("model", [None, "model", [object()]])
def test_only_models_have_parameters(model):
    with pytest.raises(MisuseError, match="a model or a list of model chunks, got"):
        gathered_parameters(model)
