"""megatron.gathered-when-read in Megatron's own readers, and around the optimizer's step, at 2 and 4 ranks."""

import gc
import importlib
from functools import partial
from types import SimpleNamespace

import pytest
from rigs.cells import cells_of
from rigs.megatron.gathers import OVERLAP, PLAIN, Collectives, export, pair, state_of, unwrapped, whole, wrong
from rigs.megatron.options import UNPATCHED, buckets, needs_training

from megapatch import apply, restore
from megapatch._mcore.param_gathers import STEPPED
from megapatch._python.finding import find_module
from megapatch.patches._readers import Reader
from megapatch.testing import init_parallel, megatron_training_available, tiny_gpt
from megapatch.weight_sync import gathered_parameters

PATCH = "megatron.gathered-when-read"
RESHARDING = "megatron.core.resharding.refit"
needs_resharding = pytest.mark.skipif(not find_module(RESHARDING), reason="this Megatron has no refit (to 0.15)")
STEPS = 3
ALIGNED = {"align_param_gather": True, "align_grad_reduce": True}
streamed = Reader("export", "chunks", stream=True).gather_first(export)


def read_sharded(model):
    return whole(model.chunks[0].sharded_state_dict())


def read_unwrapped(model):
    return whole(unwrapped(model.chunks[0]).sharded_state_dict())


def read_a_part(model):
    return whole(unwrapped(model.chunks[0]).decoder.layers[0].sharded_state_dict())


def read_local(model):
    return {name: tensor for name, tensor in model.chunks[0].state_dict().items() if tensor is not None}


def read_state(model, ckpt_format="torch_dist"):
    module = importlib.import_module("megatron.training.checkpointing")
    args = SimpleNamespace(ckpt_format=ckpt_format, no_save_optim=True, no_save_rng=True)
    chunks = [chunk.module for chunk in model.chunks]  # as save_checkpoint() passes them
    return whole(module.generate_state_dict(args, chunks, None, None, None)["model"])


def read_by_inference(model):
    """Return the parameters that a separate model for inference gets from Megatron's own refit, over gloo."""
    refit = importlib.import_module(RESHARDING)
    target = unwrapped(tiny_gpt().chunks[0])
    refit.swap_model_weights(model.chunks, target, refit.GlooCopyService())
    return dict(export([target]))


# ------------------------------------------------------------------------------------------ what two ranks do
def after_steps(read):
    """By step: the fraction that is wrong of what a reader finds at once."""
    plain, model = pair()
    found = []
    for step in range(STEPS):
        plain.train_step(step)
        model.train_step(step)
        found.append(wrong(read(model), read(plain)))
    return found


def made_before_the_step():
    """A stream, and one that is half read when the next step comes."""
    plain, model = pair()
    chunks = [unwrapped(chunk) for chunk in model.chunks]
    found, expected = streamed(chunks), export([unwrapped(chunk) for chunk in plain.chunks])
    plain.train_step()
    model.train_step()
    return wrong(dict(found), dict(expected))


def gathers(reads, between=0, first=0, **options):
    """Gathers of three steps and the forward pass after them, in buckets."""
    plain, model = tiny_gpt(**{**PLAIN, **options}), tiny_gpt(**{**OVERLAP, **options})
    expected = []
    for step in range(STEPS):
        plain.train_step(step)
        expected.append(plain.parameters())
    with Collectives().counted() as counted:
        for _ in range(first):
            gathered_parameters(model.chunks)
        for step in range(STEPS):
            model.zero_grad()
            model.forward_backward(step)
            for _ in range(between):
                gathered_parameters(model.chunks)
            model.optimizer.step()
            for _ in range(reads):
                gathered_parameters(model.chunks)
                assert wrong(model.parameters(), expected[step]) == 0
        model.forward_backward(forward_only=True)
    assert wrong(model.parameters(), expected[-1]) == 0
    return counted.gathers / buckets(model.chunks[0])


def switch_hooks(ddp):
    """Switch the hooks off and on, as frameworks do around a save."""
    ddp.disable_forward_pre_hook()
    ddp.enable_forward_pre_hook()


def hooks_switched_before_the_step():
    """The fraction that is wrong in training, where that gather must not count for the step after it."""
    plain, model = pair()
    for step in range(2):
        plain.train_step(step)
        model.zero_grad()
        model.forward_backward(step)
        switch_hooks(model.chunks[0])
        model.optimizer.step()
    model.forward_backward(forward_only=True)
    return wrong(model.parameters(), plain.parameters())


def activated_mid_run():
    """Patched, taken back and patched again in the middle of a run: what is not known is gathered."""
    plain, model = pair()
    found = []
    for step, switch in enumerate((None, restore, None, apply, None)):
        if switch is not None:
            switch()
        plain.train_step(step)
        model.zero_grad()
        model.forward_backward(step)
        gathered_parameters(model.chunks)
        model.optimizer.step()
        gathered_parameters(model.chunks)
        found.append(wrong(model.parameters(), plain.parameters()))
    return found


def orphan():
    """The shards of a model whose DistributedDataParallel, which alone could gather, is gone."""
    _, model = pair()
    model.train_step()
    chunk = unwrapped(model.chunks[0])
    del model
    gc.collect()
    return len(chunk.sharded_state_dict()) > 0


def second_optimizer():
    """Read after a step, and after an optimizer was made that has not stepped."""
    plain, model = pair()
    for each in (plain, model):
        each.train_step()
    (child,) = model.optimizer.chained_optimizers
    importlib.import_module("megatron.core.optimizer").get_megatron_optimizer(child.config, model.chunks)
    return wrong(read_sharded(model), read_sharded(plain))


def alike():
    """Return what each rank takes to be done and pending, after each of many kinds of calls."""
    _, model = pair()
    found = [state_of(model)]
    for step in range(2):
        for call in (
            model.zero_grad,
            partial(model.forward_backward, step),
            model.optimizer.step,
            partial(gathered_parameters, model.chunks),
            model.chunks[0].disable_forward_pre_hook,
            model.chunks[0].enable_forward_pre_hook,
        ):
            call()
            groups = [STEPPED.get(group) for group in model.chunks[0].bucket_groups]
            found.append((state_of(model), groups))
    return found


def readers():
    yield "sharded_state_dict", partial(after_steps, read_sharded)
    yield "sharded_state_dict, unwrapped", partial(after_steps, read_unwrapped)
    yield "sharded_state_dict of a part", partial(after_steps, read_a_part)
    if megatron_training_available():
        yield "generate_state_dict", partial(after_steps, read_state)
    if find_module(RESHARDING):
        yield "swap_model_weights", partial(after_steps, read_by_inference)


def unpatched(rank, world_size):
    init_parallel()
    yield from readers()
    yield "state_dict", partial(after_steps, read_local)
    yield "hooks switched before the step", hooks_switched_before_the_step


def patched(rank, world_size):
    init_parallel()
    yield from readers()
    yield "made before the step", made_before_the_step
    yield "hooks switched before the step", hooks_switched_before_the_step
    for name, options in COUNTS.items():
        yield name, partial(gathers, **options)
    yield "alike", alike
    yield "orphan", orphan
    yield "second optimizer", second_optimizer
    yield "activated mid-run", activated_mid_run


COUNTS = {
    "no read": {"reads": 0},
    "a read a step": {"reads": 1},
    "two reads a step": {"reads": 2},
    "a read before the first step": {"reads": 1, "first": 1},
    "reads before each step": {"reads": 0, "between": 1},
    "reads around each step": {"reads": 1, "between": 1},
    "aligned": {"reads": 1, **ALIGNED},
    "without overlap_grad_reduce": {"reads": 1, "overlap_grad_reduce": False},
}


without = cells_of(unpatched, 2, env=UNPATCHED)
ranks = cells_of(patched, 2)


# ------------------------------------------------------------------------------------------ the tests
@pytest.mark.parametrize(
    "name",
    [
        "sharded_state_dict",
        "sharded_state_dict, unwrapped",
        "sharded_state_dict of a part",
        pytest.param("generate_state_dict", marks=needs_training),
        pytest.param("swap_model_weights", marks=needs_resharding),
    ],
)
@pytest.mark.quick
def test_megatrons_readers_give_the_parameters_of_a_run_without_overlap(without, ranks, name):
    for before, after in zip(without, ranks, strict=True):
        assert all(0.4 < fraction < 0.6 for fraction in before[name])
        assert after[name] == [0] * STEPS


def test_a_stream_gathers_at_its_first_next(ranks):
    assert [found["made before the step"] for found in ranks] == [0, 0]


@pytest.mark.parametrize("name", COUNTS)
def test_no_gather_is_added(ranks, name):
    assert [found[name] for found in ranks] == [STEPS + 1] * 2


def test_a_gather_between_backward_and_step_is_not_the_last_one(without, ranks):
    """Megatron's own way to gather, at the wrong moment: without the patch training runs on old shards."""
    assert all(found["hooks switched before the step"] > 0.4 for found in without)
    assert [found["hooks switched before the step"] for found in ranks] == [0, 0]


@pytest.mark.quick
def test_without_the_patch_what_one_rank_reads_is_a_mixture(without):
    assert all(0.4 < fraction < 0.6 for found in without for fraction in found["state_dict"])


def test_a_model_that_nobody_can_gather_is_read_as_it_is(ranks):
    assert all(found["orphan"] for found in ranks)


def test_a_second_optimizer_does_not_hide_what_the_first_has_stepped(ranks):
    assert [found["second optimizer"] for found in ranks] == [0, 0]


def test_all_ranks_decide_alike(ranks):
    assert ranks[0]["alike"] == ranks[1]["alike"]


def test_activation_and_restoring_mid_run(ranks):
    assert [found["activated mid-run"] for found in ranks] == [[0] * 5] * 2
