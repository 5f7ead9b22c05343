"""The grid of layouts has whatever Megatron offers on CPU: each setting of DistributedDataParallel and each kind
of process group is in some case, or is left out for a reason. A new one in a newer Megatron fails here."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import pytest
from rigs.cells import run_cells
from rigs.megatron.options import UNPATCHED
from rigs.train_step.layouts import CASES, in_layouts, model_of
from rigs.train_step.models import allow_sequence_parallel

pytestmark = pytest.mark.thorough

FSDP = "of Megatron-FSDP, which is another class; TrainStep refuses it"
TRANSFORMER_ENGINE = "needs Transformer Engine"
NCCL = "of NCCL's buffers"
LEFT_OUT = {  # patterns of names of fields of DistributedDataParallelConfig
    "use_megatron_fsdp|use_custom_fsdp|.*fsdp.*|(outer_dp|data_parallel)_sharding_strategy": FSDP,
    "gradient_reduce_div_fusion|suggested_communication_unit_size|preserve_fp32_weights": FSDP,
    "fp[48]_param_gather|keep_fp8_transpose_cache": TRANSFORMER_ENGINE,
    "delay_wgrad_compute": TRANSFORMER_ENGINE,
    "nccl_ub|disable_symmetric_registration": NCCL,
    "reuse_grad_buf_for_mxfp8_param_ag": "TrainStep refuses it",
}
GROUPS_LEFT_OUT = {  # names of functions of parallel_state
    "get_position_embedding_group": "has one rank, unless an encoder has pipeline stages of its own",
    "get_gtp_weight_remat_group": TRANSFORMER_ENGINE,
    "get_expert_gtp_weight_remat_group": TRANSFORMER_ENGINE,
}


def settings_and_groups(layout, options):
    """Return the fields of the config that are not at their default, and the groups of more than one rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    config, default = model_of(layout, options).ddp_config, DistributedDataParallelConfig()
    fields = [field.name for field in dataclasses.fields(config)]
    changed = [name for name in fields if getattr(config, name) != getattr(default, name)]
    groups = {name: _size(getattr(parallel_state, name)) for name in dir(parallel_state) if _is_getter(name)}
    return fields, changed, groups


def _is_getter(name):
    return re.fullmatch(r"get_\w+_group", name)


def _size(getter):
    try:
        group = getter()
    except AssertionError:  # not initialized in this layout
        return 0
    return group.size() if hasattr(group, "size") else 0


def looked_at(rank, world_size):
    allow_sequence_parallel()
    for name, layout, options, _ in in_layouts(CASES, world_size):
        yield name, partial(settings_and_groups, layout, options)


@pytest.fixture(scope="module")
def cases():
    return [
        found[name]
        for ranks in (2, 4)
        for found in run_cells(looked_at, ranks, env=UNPATCHED)[:1]
        for name in found.values
    ]


def test_every_setting_of_ddp_is_in_the_grid_or_left_out_for_a_reason(cases):
    fields = set(cases[0][0])
    tested = {name for _, changed, _ in cases for name in changed}
    left_out = {name for name in fields for pattern in LEFT_OUT if re.fullmatch(pattern, name)}
    assert tested | left_out == fields
    assert not tested & left_out


def test_every_kind_of_group_is_in_the_grid_or_left_out_for_a_reason(cases):
    sizes = {}
    for _, _, groups in cases:
        for name, size in groups.items():
            sizes[name] = max(size, sizes.get(name, 0))
    tested = {name for name, size in sizes.items() if size > 1}
    assert tested | (GROUPS_LEFT_OUT.keys() & sizes.keys()) == sizes.keys()
    assert not tested & GROUPS_LEFT_OUT.keys()
