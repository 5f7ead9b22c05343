"""Mistakes of trainers, on a tiny model and the real Megatron without patches, and what the audit finds of each.

Each is a function `mistake(model, step)` that makes one step of a trainer that has it, below a row for each
variant. The tests hold the table to what is found; `docs/audit-tests.md` shows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = (
    "gradients",
    "losses and their scales",
    "swaps and offloads of weights",
    "loads, saves and exports",
    "the schedule",
    "modes",
    "ranks",
    "hooks",
)


@dataclass(frozen=True)
class Mistake:
    """A mistake, and what is found of it.

    Attributes:
        name: in a few words.
        kind: of `KINDS`.
        take_step: makes a step with it.
        finds: by rule, after how many optimizer steps of three; notes, too. Nothing is a mistake that is missed.
        layout: of `init_parallel`.
        options: of `tiny_gpt`.
        why: it is missed.
    """

    name: str
    kind: str
    take_step: Callable[[Any, int], None]
    finds: Mapping[str, int]
    layout: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


@contextlib.contextmanager
def unfinished(model):
    """Leave gradients as they are at the end of calls: not reduced, nor divided by their tokens."""
    finalize, model.config.finalize_model_grads_func = model.config.finalize_model_grads_func, None
    yield
    model.config.finalize_model_grads_func = finalize


def other_optimizer(model, chunks=None, **options):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(
        OptimizerConfig(**{"optimizer": "sgd", "lr": 0.1, **options}), chunks or model.chunks
    )


class Table:
    """The mistakes of one kind, by name."""

    def __init__(self, kind: str) -> None:
        assert kind in KINDS
        self.kind, self.rows = kind, {}

    def row(self, name, finds, *, layout=None, why="", **options):
        """Add the mistake that this decorates. Its `finds` are rules, with numbers of steps."""
        assert name not in self.rows and bool(finds) != bool(why)
        self.rows[name] = None  # keeps the place of the first of several

        def add(take_step):
            self.rows[name] = Mistake(name, self.kind, take_step, finds, layout or {}, options, why)
            return take_step

        return add
