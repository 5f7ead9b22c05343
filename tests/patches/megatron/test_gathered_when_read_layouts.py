"""Right after a step: streams of parameters in layouts of four ranks, and checkpoints of Megatron's at two."""

import importlib
from functools import partial
from types import SimpleNamespace

import pytest
from rigs.cells import cells_of
from rigs.megatron.gathers import PLAIN, export, gathers_of_one_rank_as_with_nccl, pair, unwrapped, wrong
from rigs.megatron.options import UNPATCHED, needs_training, quick_writer

from megapatch.patches._readers import Reader
from megapatch.testing import MegatronLoop, init_parallel, tiny_gpt

STEPS = 3
MOE = {"experts": 4}
# The first chunk's gather begins within the optimizer's step, before the other chunks' and the experts' optimizers
# step. Its experts' gather begins then, too: too early where several ranks have the same experts, and over gloo in
# any case (see gathers_of_one_rank_as_with_nccl).
IN_THE_STEP = {"optim": {**PLAIN["optim"], "overlap_param_gather_with_optimizer_step": True}}
LAYOUTS = {  # the layout, the model's options, and how much of it is at least wrong without a gather
    "dp2 pp2": ({"pp": 2}, {}, 0.2),
    "dp2 pp2 vpp2": ({"pp": 2, "vpp": 2}, {}, 0.2),
    "dp2 pp2 vpp2, gathered in the step": ({"pp": 2, "vpp": 2}, IN_THE_STEP, 0.15),
    "dp2 pp2 vpp2 ep2, gathered in the step": ({"pp": 2, "vpp": 2, "ep": 2}, {**MOE, **IN_THE_STEP}, 0.02),
    "dp2 tp2": ({"tp": 2}, {}, 0.2),
    "dp4 ep2": ({"ep": 2}, MOE, 0.2),
}
streamed = Reader("export", "chunks", stream=True).gather_first(export)


def in_layout(sizes, **options):
    """By step: the fraction of a stream that is wrong without a gather, and with."""
    plain, model = pair(layers=4, **options)
    found = []
    for step in range(STEPS):
        plain.train_step(step)
        with gathers_of_one_rank_as_with_nccl():
            model.train_step(step)
        chunks, expected = ([unwrapped(chunk) for chunk in each.chunks] for each in (model, plain))
        without = dict(export(chunks))
        expected = dict(export(expected))
        found.append((wrong(without, expected), wrong(dict(streamed(chunks)), expected)))
    return found


def in_layouts(rank, world_size):
    for name, (sizes, options, _) in LAYOUTS.items():
        init_parallel(**sizes)
        yield name, partial(in_layout, sizes, **options)


four = cells_of(in_layouts, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_streams_in_layouts(four, name):
    for found in four:
        for before, after in found[name]:
            assert before > LAYOUTS[name][2]
            assert after == 0


FORMATS = "torch_dist", "torch"  # all ranks collect what is saved, or one alone
SCHEDULER = SimpleNamespace(step=lambda increment: None, state_dict=dict, load_state_dict=lambda state: None)
ONLY_PARAMETERS = "--no-save-optim", "--no-load-optim", "--no-save-rng", "--no-load-rng"


def checkpointing(model, folder, ckpt_format):
    flags = ["--save", folder, "--load", folder, "--save-interval", "100", "--ckpt-format", ckpt_format]
    MegatronLoop(model, flags=[*flags, *ONLY_PARAMETERS])
    return importlib.import_module("megatron.training.checkpointing")


def save_and_load(folder, ckpt_format):
    """The fraction that is wrong of what was saved."""
    plain, model = pair()
    plain.train_step()
    model.train_step()
    folder = f"{folder}/{ckpt_format}"
    module = checkpointing(model, folder, ckpt_format)
    module.save_checkpoint(1, model.chunks, model.optimizer, SCHEDULER, 0, checkpointing_context={})
    loaded = tiny_gpt(**PLAIN)
    for parameter in loaded.chunks[0].parameters():
        parameter.data.zero_()
    module = checkpointing(loaded, folder, ckpt_format)
    module.load_checkpoint(loaded.chunks, loaded.optimizer, SCHEDULER, checkpointing_context={})
    return wrong(loaded.parameters(), plain.parameters())


def job(rank, world_size, folder):
    init_parallel()
    quick_writer()
    for ckpt_format in FORMATS:
        yield ckpt_format, partial(save_and_load, folder, ckpt_format)


without = cells_of(job, 2, folder="without", env=UNPATCHED)
ranks = cells_of(job, 2, folder="with")


@needs_training
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_a_checkpoint_has_the_parameters_of_the_last_step(without, ranks, ckpt_format):
    assert all(0.4 < found[ckpt_format] < 0.6 for found in without)
    assert [found[ckpt_format] for found in ranks] == [0, 0]
