"""Without false alarms: what trainers do between and around steps, with ranks compared in every step.

The correct trainers of `audit.correct` do rightly what others do wrongly; these have no mistake beside them.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from rigs.cells import run_cells
from rigs.megatron.options import ADAM, BOTH, GRADS, new_machine, rerun, rerun_data
from rigs.megatron.save import Saves, has_working_writer, minor, prepare
from rigs.mistakes.losses import FP16
from rigs.mistakes.schedules import schedule_of
from rigs.train_step.models import in_pieces
from torch.distributed.fsdp import fully_shard

from megapatch import audit
from megapatch.testing import MegatronLoop, init_parallel, tiny_gpt
from megapatch.testing._availability import megatron_training_available
from megapatch.train_step import TrainStep

STEPS = 3


def of_what_is_trained(frozen, options):
    model = tiny_gpt(layers=4, frozen=frozen, **options)
    for step in range(STEPS):
        model.train_step(step)


def evaluated():
    """A reference pass and an evaluation between the calls of a step, and after it."""
    model = tiny_gpt(**BOTH, per_token_loss=True)
    for step in range(STEPS):
        model.train_step(step, masked=True)
        with torch.no_grad():
            model.forward_backward(step, forward_only=True, masked=True)
        model.forward_backward(step, forward_only=True, masked=True)


def two_models():
    """Each in pieces, with a step of the other between them: an actor and its critic."""
    models = [tiny_gpt(**GRADS, per_token_loss=True), tiny_gpt(**FP16)]
    steps = [TrainStep(model=model.chunks, optimizer=model.optimizer) for model in models]
    for step in range(STEPS):
        with steps[0]:
            in_pieces(steps[0], models[0], step, (1, 1), {"masked": True})
            models[1].train_step(step)
            steps[0].finish()


def overflowing():
    model = tiny_gpt(**FP16)
    schedule = schedule_of(model)
    for step in range(STEPS):
        model.zero_grad()
        model.forward_backward(step)
        if step == 1:
            model.chunks[0].buffers[0].grad_data[0] = torch.inf
        if model.optimizer.step()[0]:
            schedule.step(1)


def read_after_an_overflow():
    """A skipped step leaves nothing to be gathered: the forward pass before it has gathered the last step's."""
    model = tiny_gpt(**FP16, **BOTH)
    model.train_step(0)
    model.zero_grad()
    model.forward_backward(1)
    model.chunks[0].buffers[0].grad_data[0] = torch.inf
    assert not model.optimizer.step()[0]
    model.chunks[0].state_dict()


def not_reduced():
    """Over one rank there is nothing to reduce."""
    model = tiny_gpt()
    model.config.finalize_model_grads_func = None
    for step in range(STEPS):
        model.train_step(step)


def rerun_in_place():
    """A step is run again, as by Megatron's train_step(), and the gradients of its first run are zeroed unused."""
    machine, data, runs = new_machine(), rerun_data(0), []
    model = tiny_gpt(**BOTH)
    for step in range(STEPS):
        while machine.should_run_forward_backward(data):
            model.zero_grad()
            model.forward_backward(step)
            loss = torch.tensor(float("nan") if len(runs) == 1 else 1.0)  # nothing is validated in the first step
            machine.validate_result(loss, rejection_func=torch.isnan, message="NaN", fatal=False)
            runs.append(step)
        if ends_job := any(machine.should_checkpoint_and_exit()):
            break
        model.optimizer.step()
    rerun().destroy_rerun_state_machine()
    assert runs == ([0, 1, 1] if ends_job else [0, 1, 1, 2])  # up to 0.14 such a fault ends the job


def resumed(options, folder, rank):
    """A checkpoint with the optimizer, loaded again in place two steps later, and trained on."""
    from megatron.core import dist_checkpointing

    def tree(**flags):
        weights = module.sharded_state_dict(metadata=BUCKETS)
        state = model.optimizer.sharded_state_dict(weights, metadata=BUCKETS, **flags)
        return {"model": weights, "optimizer": state}

    model = tiny_gpt(**options)
    module = model.chunks[0].module
    model.train_step(0)
    model.gather_parameters()
    path, _ = Saves(rank, folder).plan_tree(tree(), at_once=True)
    for step in range(1, STEPS):
        model.train_step(step)
    model.gather_parameters()
    loaded = dist_checkpointing.load(tree(is_loading=True), path)
    module.load_state_dict(loaded["model"])
    model.optimizer.load_state_dict(loaded["optimizer"])
    for step in range(1, STEPS):
        model.train_step(step)


def gone_back():
    """A step is undone: the weights of before are loaded, and read, with no gather between."""
    model = tiny_gpt(**BOTH)
    (ddp,) = model.chunks
    model.train_step(0)
    model.gather_parameters()
    saved = {name: value.clone() for name, value in ddp.state_dict().items() if torch.is_tensor(value)}
    for step in range(1, STEPS):
        model.train_step(step)
        ddp.load_state_dict(saved, strict=False)
        model.optimizer.reload_model_params()
        ddp.state_dict()


def megatrons_own(rerun_mode):
    model = tiny_gpt(layers=4, hooks=False, **BOTH)
    loop = MegatronLoop(model, rerun_mode=rerun_mode)
    loop.train(STEPS)
    loop.train(STEPS)


def of_fsdp2():
    """Torch's own optimizer and reduces: there is nothing of Megatron's to see."""
    model = fully_shard(torch.nn.Linear(4, 4).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_layout(layout, function, *args):
    """Call a function in a layout, and return what is noted."""
    init_parallel(**layout)
    function(*args)
    return [note.rule for note in audit.notes()]


LARGE = ("embedding*", "*linear*", "output*")
CELLS = {
    "frozen layers": ({}, of_what_is_trained, ("*layers.1.*",), BOTH),
    "only some small parameters are trained": ({}, of_what_is_trained, LARGE, GRADS),
    "the same in a pipeline": ({"pp": 2}, of_what_is_trained, LARGE, {}),
    "evaluated": ({}, evaluated),
    "two models": ({}, two_models),
    "overflows": ({}, overflowing),
    "read after an overflow": ({}, read_after_an_overflow),
    "not reduced over one rank": ({"tp": 2}, not_reduced),
    "rerun in place": ({}, rerun_in_place),
    "gone back and read": ({}, gone_back),
}
BUCKETS = {"distrib_optim_sharding_type": "dp_reshardable"}
SAVES = {}
if has_working_writer():
    SAVES["resumed"] = partial(resumed, {"dtype": "bf16", **ADAM})
if minor() >= 16:  # up to 0.15 buckets cannot be saved
    SAVES["resumed, sharded"] = partial(resumed, BOTH)
if megatron_training_available():
    CELLS["train() twice"] = ({}, megatrons_own, "disabled")
    CELLS["train() twice, validated"] = ({}, megatrons_own, "validate_results")

NOTED = {"overflows": ["gradients-kept"], "read after an overflow": ["gradients-kept"]}
"""Cells that write into gradients by hand."""


def job(rank, world_size, folder):
    prepare()
    for name, function in SAVES.items():
        yield name, partial(in_layout, {}, function, folder, rank)
    yield "FSDP2", partial(in_layout, {}, of_fsdp2)
    for name, (layout, *call) in CELLS.items():
        yield name, partial(in_layout, layout, *call)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_cells(job, 2, str(tmp_path_factory.mktemp("saves")), audited=True)


@pytest.mark.parametrize("name", [*SAVES, "FSDP2", *CELLS])
def test_nothing_is_found(ranks, name):
    for cells in ranks:
        assert cells[name] == NOTED.get(name, [])  # a finding fails the cell
