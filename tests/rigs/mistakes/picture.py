"""The picture of docs/audit.md: a trainer with mistakes on two ranks, as `megapatch audit --html` draws it.

python -m rigs.mistakes.picture      makes the run, and writes docs/audit_timeline.svg
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import torch

from megapatch._cli.audit.command import read
from megapatch._cli.audit.picture import picture
from megapatch.testing import init_parallel, run_ranks, tiny_gpt
from rigs.cells import AUDITED
from rigs.megatron.options import UNPATCHED, Interrupted, raising_half_way
from rigs.mistakes.schedules import schedule_of
from rigs.mistakes.weights import BF16, copies_of, put

DOCS = Path(__file__).parents[3] / "docs"
FILE = "audit_timeline.svg"
STEPS = 24


def mistaken_run(rank, world_size):
    """Train with an exception, saves, loads, a reference that stays in one rank's model, and steps made twice.

    Gradients are offloaded in between, and weights exchanged, as is right.
    """
    from megapatch import audit

    init_parallel()
    model = tiny_gpt(layers=4, **BF16)
    schedule = schedule_of(model)
    for step in range(STEPS):
        if step == 3:
            with contextlib.suppress(Interrupted), raising_half_way(model, 0):
                model.train_step(step)
        if step == 8 and rank == 1:
            put(model, [weight * 0.5 for weight in copies_of(model)])
        if step % 5 == 4:
            offload_gradients(model)
        if step in (11, 17):
            for parameter in model.chunks[0].parameters():
                parameter.data = parameter.data.clone()
        if step in (14, 15):
            load_weights_alone(model)
        model.train_step(step)
        if step >= 18:
            model.optimizer.step()
        schedule.step(2)
        if step >= 20:
            schedule.step(2)
        if step % 6 == 5:
            save(model)
    audit.stop()


def offload_gradients(model):
    for buffer in model.chunks[0].buffers:
        storage = buffer.grad_data.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        model.in_between = torch.empty(size, dtype=torch.uint8)  # else they may come back to their address
        storage.resize_(size)
        buffer.grad_data.zero_()


def load_weights_alone(model):
    chunk = model.chunks[0]
    chunk.load_state_dict(
        {
            name: value * 0.9 if isinstance(value, torch.Tensor) else value
            for name, value in chunk.state_dict().items()
        }
    )


def save(model):
    from megatron.core.dist_checkpointing.serialization import save

    with contextlib.suppress(TypeError):  # only what is asked for counts: no rank begins to write
        save({"model": model.chunks[0].sharded_state_dict()}, "", no_such_option=None)


def summary():
    """Make the run, and return what `megapatch audit` reads of it."""
    with tempfile.TemporaryDirectory(prefix="megapatch-picture-") as folder:
        env = {**UNPATCHED, **AUDITED, "MEGAPATCH_REPORT": folder}
        run_ranks(mistaken_run, 2, env=env)
        found, unreadable = read(Path(folder))
    assert not unreadable
    return found


if __name__ == "__main__":
    drawn = picture(summary())
    (DOCS / FILE).write_text(drawn)
    print(f"wrote docs/{FILE}", file=sys.stderr)
