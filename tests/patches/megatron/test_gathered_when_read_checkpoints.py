"""megatron.gathered-when-read: a checkpoint that Megatron writes right after a step, at 2 ranks."""

import importlib
from functools import partial
from types import SimpleNamespace

import pytest
from rigs.cells import cells_of
from rigs.megatron.gathers import PLAIN, pair, wrong
from rigs.megatron.options import UNPATCHED, needs_training, quick_writer

from megapatch.testing import MegatronLoop, init_parallel, tiny_gpt

pytestmark = needs_training

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


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_a_checkpoint_has_the_parameters_of_the_last_step(without, ranks, ckpt_format):
    assert all(0.4 < found[ckpt_format] < 0.6 for found in without)
    assert [found[ckpt_format] for found in ranks] == [0, 0]
