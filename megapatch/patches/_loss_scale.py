"""The loss scale of an optimizer, by which Megatron's schedules multiply every loss if the config says so."""

from __future__ import annotations

from typing import Any

from ..patch import FIXED, NEEDED, Verdict
from ._diagnosis import expect_none, unmet

HOOK = "grad_scale_func"
"""Of a model's config: what the schedules call with the loss, and with the losses that a model adds by itself."""


def diagnose_loss_scale(setting: str, missing: list[str], needed: str) -> Verdict:
    """Return the verdict on the function that sets up a model's config.

    Args:
        setting: its path.
        missing: names that the patch relies on and did not find.
        needed: the defect, in words.
    """
    owner = setting.partition(":")[2].rpartition(".")[0]
    if not unmet.names(setting, HOOK):
        return Verdict(FIXED, f"{owner} sets {HOOK}")
    expect_none(*missing)
    return Verdict(NEEDED, needed)


def pass_on_loss_scale(config: Any, optimizer: Any) -> None:
    """Let Megatron scale losses as the optimizer unscales gradients, where nothing is set and there is one."""
    scale_loss = getattr(optimizer, "scale_loss", None)
    if scale_loss is not None and getattr(config, HOOK) is None:
        setattr(config, HOOK, scale_loss)
