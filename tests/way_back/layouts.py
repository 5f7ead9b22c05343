"""How the model of a sequence is divided, what it is made of, and how it is saved."""

from __future__ import annotations

from typing import Any, NamedTuple

from rigs.megatron.offloading import OFFLOADS, offloading
from rigs.megatron.options import linear_schedule
from rigs.megatron.save import minor

from megapatch.testing import init_parallel, tiny_gpt

ADAM = {"optimizer": "adam", "lr": 0.05, "optim": {"weight_decay": 0.01, "min_lr": 0.0}}
SHARDED = {**ADAM, "use_distributed_optimizer": True}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
# Small windows, so that a count of good or bad steps that is off by one shows within two steps.
FP16 = {
    "dtype": "fp16",
    "loss_scale": 2.0**12,
    "optim": {**ADAM["optim"], "loss_scale_window": 3, "hysteresis": 2},
}
MOE = {
    "experts": 4,
    "config": {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.1,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.1,
        # Megatron up to 0.15 has none. Nothing is recorded or replayed before an action is set.
        **({"moe_enable_routing_replay": True} if minor() >= 16 else {}),
    },
}
AUX_LOSS = {
    "experts": 2,
    "config": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
}
LARGE = {"hidden": 32, "heads": 4, "seq": 16}
DROPOUT = {"config": {"hidden_dropout": 0.2, "attention_dropout": 0.2}}
STATE_DICTS = "state dicts"  # torch's
ON_DISK = "on disk"  # by Megatron's distributed checkpoints, like the sharding types


class Layout(NamedTuple):
    """A row of LAYOUTS."""

    parallel: dict[str, int]  # of init_parallel
    options: dict[str, Any]  # of tiny_gpt
    saved: str = STATE_DICTS  # or ON_DISK, or how a distributed checkpoint shards the distributed optimizer
    offload: str | None = None  # of rigs.megatron.offloading
    oldest: int = 12  # minor version of Megatron

    @property
    def is_moe(self) -> bool:
        return "experts" in self.options

    @property
    def has_replay(self) -> bool:
        """Whether its routers can replay routes."""
        return "moe_enable_routing_replay" in self.options.get("config", {})

    @property
    def is_pipeline(self) -> bool:
        return "pp" in self.parallel

    @property
    def is_fp16(self) -> bool:
        return self.options.get("dtype") == "fp16"

    @property
    def has_main_parameters(self) -> bool:
        return "dtype" in self.options

    @property
    def is_random(self) -> bool:
        """Whether passes in training mode draw random numbers."""
        return "hidden_dropout" in self.options.get("config", {})

    @property
    def has_train(self) -> bool:
        """Whether Megatron's own train() is there, which wheels have from 0.17 on, and run for this layout."""
        return minor() >= 17 and not (self.parallel or self.is_moe or self.is_fp16 or self.offload)

    @property
    def is_sharded(self) -> bool:
        return "use_distributed_optimizer" in self.options

    @property
    def is_on_disk(self) -> bool:
        """Whether saves are distributed checkpoints."""
        return self.saved != STATE_DICTS

    @property
    def can_save(self) -> bool:
        """Whether torch reads what this Megatron writes: before 0.16 distributed checkpoints have classes in them.

        Without Transformer Engine and Apex the distributed optimizer's older format cannot be loaded.
        """
        return not self.is_on_disk or minor() >= 16

    def of_another_size(self) -> Layout:
        """Return this layout with a large model, whose sequences are longer, or a small one, without replay."""
        config = {name: value for name, value in self.options.get("config", {}).items() if "replay" not in name}
        others = {name: value for name, value in self.options.items() if name not in LARGE}
        size = LARGE if others == self.options else {}
        return self._replace(options={**others, **size, "config": config})

    def set_up(self):
        init_parallel(**self.parallel)

    def build(self):
        extra = {"layers": 4} if "vpp" in self.parallel else {}
        options = {**self.options, **extra}
        if self.offload:
            options["optim"] = {**options.get("optim", {}), **OFFLOADS[self.offload]}
        return tiny_gpt(**options)

    def schedule_of(self, optimizer):
        rate = self.options["lr"]
        return linear_schedule(optimizer, steps=40, max_lr=rate, start_wd=0.01, end_wd=0.1)

    def in_use(self):
        """Return a context in which models of this layout are built, stepped, saved and loaded."""
        return offloading(OFFLOADS[self.offload] if self.offload else None)


LAYOUTS = {
    "fp32": Layout({}, ADAM),
    "bf16": Layout({}, {**ADAM, "dtype": "bf16"}),
    "fp16": Layout({}, {**ADAM, **FP16}),
    "bf16, on disk": Layout({}, {**ADAM, "dtype": "bf16"}, ON_DISK),
    "fp32, sharded": Layout({}, SHARDED, "dp_reshardable"),
    "fp16, sharded": Layout({}, {**SHARDED, **FP16}, "dp_reshardable"),
    "bf16, sharded": Layout({}, {**SHARDED, "dtype": "bf16"}, "dp_reshardable"),
    "bf16, sharded, overlaps": Layout({}, {**SHARDED, **OVERLAPS, "dtype": "bf16"}, "dp_reshardable"),
    "bf16, fully_reshardable": Layout({}, {**SHARDED, "dtype": "bf16"}, "fully_reshardable", oldest=16),
    "pp": Layout({"pp": 2}, {**ADAM, "dtype": "bf16", "overlap_grad_reduce": True}),
    "pp, vpp": Layout({"pp": 2, "vpp": 2}, {**SHARDED, **OVERLAPS, "dtype": "bf16"}, "dp_reshardable"),
    "tp": Layout({"tp": 2}, {**ADAM, "dtype": "bf16"}),
    # In fp32: a load of the same weights leaves nothing but what was drawn before it.
    "tp, dropout": Layout({"tp": 2}, {**ADAM, **DROPOUT}),
    "moe": Layout({}, {**ADAM, **MOE}, oldest=15),  # the first with global_aux_loss
    "ep": Layout({"ep": 2}, {**SHARDED, **MOE, "dtype": "bf16"}, "dp_reshardable", oldest=15),
    "offloaded": Layout({}, {**SHARDED, "dtype": "bf16", "lr": 0.01}, "dp_reshardable", offload="half", oldest=13),
    "bf16, large": Layout({}, {**SHARDED, **OVERLAPS, **LARGE, "dtype": "bf16"}, "dp_reshardable"),
    "bf16, overlapped reduce": Layout({}, {**ADAM, "dtype": "bf16", "overlap_grad_reduce": True}),
    "fp32, sharded, overlaps": Layout({}, {**SHARDED, **OVERLAPS}, "dp_reshardable"),
    "cp": Layout({"cp": 2}, {**SHARDED, "dtype": "bf16", "attention": False}, "dp_reshardable", oldest=16),
    "cp, moe": Layout({"cp": 2}, {**ADAM, **AUX_LOSS, "attention": False}, oldest=16),
    "pp, tied": Layout({"pp": 2}, {**ADAM, "dtype": "bf16", "tied_embeddings": True}, oldest=16),
    "precision-aware": Layout(
        {}, {**SHARDED, "dtype": "bf16", "lr": 0.01}, "dp_reshardable", offload="precision-aware", oldest=16
    ),
}


def layouts_here() -> list[str]:
    """Return the names of the layouts that this Megatron has."""
    return [name for name, layout in LAYOUTS.items() if minor() >= layout.oldest]
