"""Parameters that are read before they are gathered, and the hooks that gather them."""

from __future__ import annotations

from typing import Any

from ...errors import MisuseError
from ..check import DP, Check, DefectSeen, Layout, same, the_defect
from ._steps import BOTH, OVERLAP, SHARDED


def read_after_a_step(layout: Layout = DP) -> float:
    """Read sharded_state_dict() right after a step; state_dict(), which one rank may call alone, has to refuse."""
    layout.set_up()
    model, plain = layout.model(**BOTH), layout.model(**SHARDED, **OVERLAP)
    largest = 0.0
    for step in range(2):
        for trained in (model, plain):
            trained.train_step(step)
        largest = max(largest, same(_saved(model), _saved(plain), f"what is saved after step {step + 1}"))
    for trained in (model, plain):
        trained.train_step(2)
    try:
        model.chunks[0].state_dict()
    except MisuseError:
        pass
    else:
        raise DefectSeen("state_dict() returns parameters that are not gathered")
    # It changes nothing later on.
    model.gather_parameters()
    return max(largest, same(model.parameters(), plain.parameters(), "parameters"))


def _saved(model: Any) -> dict[str, Any]:
    import torch

    leaves = {key: getattr(leaf, "data", None) for key, leaf in model.chunks[0].sharded_state_dict().items()}
    return {
        key: data.detach().float().cpu().clone() for key, data in leaves.items() if isinstance(data, torch.Tensor)
    }


def hooks_switched_twice(layout: Layout = DP) -> float:
    """Switch forward pre-hooks off and on twice between steps, as around a checkpoint and a weight sync."""
    layout.set_up()
    model, plain = layout.model(**BOTH), layout.model(**SHARDED)
    for step in range(2):
        for trained in (model, plain):
            trained.train_step(step)
        (ddp,) = model.chunks
        for switch in (ddp.disable_forward_pre_hook, ddp.enable_forward_pre_hook):
            switch()
            with the_defect(KeyError, AssertionError):
                switch()
    model.gather_parameters()
    return same(model.parameters(), plain.parameters(), "parameters")


CHECKS = (
    Check(
        "megatron.gathered-when-read",
        read_after_a_step,
        "sharded_state_dict() after steps, with a run without overlap_param_gather",
        layouts=True,
    ),
    Check(
        "megatron.forward-pre-hook",
        hooks_switched_twice,
        "parameters after hooks were switched twice, with a run without overlap",
        layouts=True,
    ),
)
