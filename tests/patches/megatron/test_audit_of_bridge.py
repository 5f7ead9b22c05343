"""The audit in Megatron-Bridge's own train(), called again, interrupted and evaluating: it finds nothing."""

import pytest
from rigs.cells import AUDITED
from rigs.megatron.bridge import ALIGNED, Fault, needs_bridge, new_loop, ranks
from rigs.megatron.options import ADAM, BOTH, GRADS

pytestmark = needs_bridge

LAYOUTS = {  # ranks, layout, options
    "dp2, both": (2, {}, BOTH),
    "bf16, aligned": (2, {}, {**ALIGNED, "dtype": "bf16"}),
    "tp2": (2, {"tp": 2}, ADAM),
    "pp2": (2, {"pp": 2}, GRADS),
    "ep2": (2, {"ep": 2}, {**ADAM, "experts": 4}),
    "pp2 dp2": (4, {"pp": 2}, BOTH),
}


def trained(rank, world_size, wanted):
    """By layout, the findings and notes of three calls of train(), one of which is interrupted."""
    from megapatch import audit

    found = {}
    for name in wanted:
        _, layout, options = LAYOUTS[name]
        audit.clear()
        loop = new_loop(options, layout)
        loop.train(2)
        if "pp" not in layout:  # else some stages would wait for the one that raises
            loop.interrupted_train(Fault("loss", 3))
        loop.evaluate_each_step()
        loop.train(2)
        found[name] = [str(one) for one in (*audit.findings(), *audit.notes())]
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_nothing_is_found_and_nothing_noted(world_size):
    wanted = [name for name, (size, *_) in LAYOUTS.items() if size == world_size]
    for found in ranks(trained, wanted, world_size=world_size, env=AUDITED):
        assert found == {name: [] for name in wanted}
