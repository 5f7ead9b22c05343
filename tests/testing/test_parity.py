"""Every layout, precision and optimizer trains the tiny GPT as one fp32 process does."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from rigs.cells import Found, run_cells
from rigs.megatron.options import ADAM, BOTH, UNPATCHED
from rigs.megatron.options import GRADS as OVERLAP

from megapatch.testing import init_parallel, tiny_gpt

STEPS = 3
MICROBATCHES = 4  # of the global batch

DISTOPT = {"use_distributed_optimizer": True, **ADAM}
MOE = {"experts": 4}


@dataclass(frozen=True)
class Configuration:
    name: str
    ranks: int
    layout: dict[str, int] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> Configuration:
        """One fp32 process with the same model, optimizer and loss."""
        same = {name: self.model[name] for name in ("experts", "optimizer", "optim") if name in self.model}
        return Configuration(f"reference {same} {self.step}", 1, model=same, step=self.step)


CONFIGURATIONS = [
    Configuration("dp2", 2),
    Configuration("dp2 two-tuple loss", 2, step={"two_tuple": True}),
    Configuration("dp2 two-tuple masked loss", 2, step={"two_tuple": True, "masked": True}),
    Configuration("dp2 masked loss", 2, step={"masked": True}),
    Configuration("dp2 per-token loss", 2, model={"per_token_loss": True}),
    Configuration("dp2 overlap", 2, model=OVERLAP),
    Configuration("dp2 distopt", 2, model=DISTOPT),
    Configuration("dp2 distopt overlap", 2, model=BOTH),
    Configuration("dp2 bf16 distopt overlap", 2, model={**BOTH, "dtype": "bf16"}),
    Configuration("dp2 fp16", 2, model={"dtype": "fp16"}),
    Configuration("dp2 fp16 distopt overlap", 2, model={**BOTH, "dtype": "fp16"}),
    Configuration("pp2", 2, {"pp": 2}),
    Configuration("pp2 vpp2", 2, {"pp": 2, "vpp": 2}),
    Configuration("pp2 vpp2 overlap", 2, {"pp": 2, "vpp": 2}, OVERLAP),
    Configuration("tp2", 2, {"tp": 2}),
    Configuration("moe dp2", 2, model=MOE),
    Configuration("moe ep2", 2, {"ep": 2}, MOE),
    Configuration("moe ep2 distopt overlap", 2, {"ep": 2}, {**MOE, **BOTH}),
    Configuration("pp2 dp2 distopt overlap", 4, {"pp": 2}, BOTH),
    Configuration(
        "pp2 vpp2 dp2 distopt overlap aligned", 4, {"pp": 2, "vpp": 2}, {**BOTH, "align_param_gather": True}
    ),
    Configuration("pp2 dp2 overlap unaligned", 4, {"pp": 2}, {**OVERLAP, "align_grad_reduce": False}),
    Configuration("tp2 dp2 distopt overlap", 4, {"tp": 2}, BOTH),
]
#             loss  gradient norm (relative)  parameters
TOLERANCES = {"fp32": (1e-5, 1e-5, 1e-5), "bf16": (1e-2, 2e-2, 1e-2), "fp16": (1e-3, 1e-2, 1e-3)}


@dataclass
class Trained:
    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, torch.Tensor]
    tp_rank: int


def train(rank, world_size, configurations):
    """Train all these, one after the other, in the same processes."""
    for configuration in configurations:
        yield configuration.name, partial(train_one, world_size, configuration)


def train_one(world_size: int, configuration: Configuration) -> Trained:
    from megatron.core import parallel_state

    init_parallel(**configuration.layout)
    model = tiny_gpt(layers=4, **configuration.model)
    count = MICROBATCHES // parallel_state.get_data_parallel_world_size()
    steps = [model.train_step(step, num_microbatches=count, **configuration.step) for step in range(STEPS)]
    model.gather_parameters()
    losses, grad_norms = map(list, zip(*steps, strict=True))
    return Trained(losses, grad_norms, model.parameters(), parallel_state.get_tensor_model_parallel_rank())


class Runs:
    """Trains configurations when their results are wanted, with all others of as many ranks at once."""

    def __init__(self, configurations: list[Configuration]) -> None:
        self.configurations = list({each.name: each for each in configurations}.values())
        self.done: dict[int, list[Found]] = {}

    def of(self, configuration: Configuration) -> list[Trained]:
        ranks = configuration.ranks
        if ranks not in self.done:
            together = [each for each in self.configurations if each.ranks == ranks]
            self.done[ranks] = run_cells(train, ranks, together, env=UNPATCHED)
        return [found[configuration.name] for found in self.done[ranks]]


@pytest.fixture(scope="module")
def runs():
    return Runs([*CONFIGURATIONS, *(each.reference for each in CONFIGURATIONS)])


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_as_one_fp32_process(runs, configuration):
    loss, norm, weight = TOLERANCES[configuration.model.get("dtype", "fp32")]
    (alone,) = runs.of(configuration.reference)
    seen = set()
    for trained in runs.of(configuration):
        assert trained.losses == pytest.approx(alone.losses, abs=loss)
        assert trained.grad_norms == pytest.approx(alone.grad_norms, rel=norm)
        for name, parameter in trained.parameters.items():
            expected = part_of(alone.parameters[name], parameter.shape, trained.tp_rank)
            torch.testing.assert_close(parameter, expected, rtol=0, atol=weight, msg=lambda m, n=name: f"{n}: {m}")
        seen |= set(trained.parameters)
    assert seen == set(alone.parameters)
    assert abs(alone.losses[0] - alone.losses[-1]) > 5 * loss  # or the comparison would show nothing


def part_of(whole: torch.Tensor, shape: torch.Size, tp_rank: int) -> torch.Tensor:
    """The tensor-parallel shard of this shape."""
    for dim, (size, part) in enumerate(zip(whole.shape, shape, strict=True)):
        if size != part:
            return whole.chunk(size // part, dim)[tp_rank]
    return whole
