"""megatron.main-params-after-load: loads while parameters are gathered, or wait for that, at 2 ranks.

Gathers end late: what nobody has waited for is written when somebody does, over whatever was loaded meanwhile.
"""

from functools import partial

import pytest
import torch
from rigs.cells import run_cells
from rigs.fake_gpu.collectives import make_collectives_late
from rigs.megatron.gathers import pair, unwrapped, wrong
from rigs.megatron.options import UNPATCHED, assert_misuse, attempt

from megapatch.testing import init_parallel

WRAPPED = {"wrapped": lambda ddp: ddp, "unwrapped": unwrapped}


def gone_back(under_way, of):
    """Load the weights of before a step whose gathers are under way, or were not begun.

    Returns what the next forward pass has of them: the fraction that is wrong; and what a read before it says.
    """
    init_parallel()
    _, model = pair()
    (ddp,) = model.chunks
    before = model.parameters()
    target = of(ddp)
    saved = {
        name: value.clone() if hasattr(value, "clone") else value for name, value in target.state_dict().items()
    }
    model.train_step()
    if under_way:
        ddp.start_param_sync()
    target.load_state_dict(saved, strict=False)
    read = attempt(ddp.state_dict)
    model.forward_backward(1, forward_only=True)
    return wrong(model.parameters(), before), read


def gone_back_in_part():
    """Load one parameter only: the others of its bucket group are still to be gathered."""
    _, model = pair()
    (ddp,) = model.chunks
    name, value = next((name, value) for name, value in ddp.state_dict().items() if torch.is_tensor(value))
    value = value.clone()
    model.train_step()
    ddp.load_state_dict({name: value}, strict=False)
    return attempt(ddp.state_dict)


def job(rank, world_size):
    for name, of in WRAPPED.items():
        for under_way in (False, True):
            yield (name, under_way), partial(gone_back, under_way, of)
    yield "in part", gone_back_in_part


@pytest.fixture(scope="module")
def patched():
    return run_cells(job, 2, setup=make_collectives_late)


@pytest.fixture(scope="module")
def unpatched():
    return run_cells(job, 2, setup=make_collectives_late, env=UNPATCHED)


@pytest.mark.parametrize("name", WRAPPED)
def test_without_the_patch_a_gather_under_way_writes_over_what_is_loaded(unpatched, name):
    assert all(found[name, True][0] > 0.4 for found in unpatched)


@pytest.mark.parametrize("under_way", [False, True], ids=["not begun", "under way"])
@pytest.mark.parametrize("name", WRAPPED)
def test_what_is_loaded_stays_and_can_be_read(patched, name, under_way):
    for found in patched:
        differing, (error, _) = found[name, under_way]
        assert (differing, error) == (0.0, None)


def test_what_was_not_loaded_is_still_to_be_gathered(patched):
    for found in patched:
        assert_misuse(found["in part"], "not gathered yet")
