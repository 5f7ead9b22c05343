"""nemo_rl.gathered-when-read: a refit sends the parameters of the last step."""

import contextlib
import importlib
from types import SimpleNamespace
from unittest import mock

import pytest
from rigs.cells import AUDITED
from rigs.imported import run_with_megatron
from rigs.megatron.gathers import OVERLAP, PLAIN
from rigs.nemo_rl.steps import read_after_steps
from rigs.nemo_rl.worker import GPT, find_nemo_rl, has_refit_of_local_shards, worker_for

from megapatch import audit
from megapatch.testing import init_parallel, tiny_gpt

PATCH = "nemo_rl.gathered-when-read"
STEPS = 3

pytestmark = [
    pytest.mark.skipif(not has_refit_of_local_shards(), reason="this NeMo-RL has no refit of local shards"),
    pytest.mark.thorough,
]


def refitting_worker(options):
    """Return a worker whose views have been made, as before training, of its feed-forward weights."""
    worker = worker_for(tiny_gpt(**{**GPT, **options, "ddp": GPT["ddp"]}))
    views = {
        name: parameter.detach()
        for name, parameter in worker.model.module.named_parameters()
        if "mlp.linear" in name and name.endswith("weight")
    }
    assert views
    params = [{"name": name, "global_shape": view.shape, **MESHES} for name, view in views.items()]
    worker.nccl_reshard_refit_info = {"layer_names": ["all"], "per_layer_params": {"all": params}}
    worker.my_pp_stage, worker.pp_comm_group = 0, None
    specs = {name: SimpleNamespace(base=view, pre=None, post=None) for name, view in views.items()}
    worker.hf_to_local_param_map = specs
    return worker


MESHES = dict.fromkeys(("src_mesh_info", "src_placements", "dst_mesh_info", "dst_placements"))


def sent_by(worker):
    found = []

    def send(source, *meshes_and_groups):
        found.append(source._local_tensor.clone())

    with mock.patch.object(importlib.import_module("nemo_rl.weight_sync.xferdtensor"), "xferdtensor", send):
        worker.nccl_reshard_refit()
    return dict(zip(worker.hf_to_local_param_map, found, strict=True))


def refits(rank, world_size):
    """Return which fraction of what is sent is wrong, by step; the gathers, by bucket group; broken rules."""
    init_parallel()
    with contextlib.redirect_stdout(None):
        found = read_after_steps(sent_by, refitting_worker(PLAIN), refitting_worker(OVERLAP), STEPS)
    return *found, [finding.rule for finding in audit.findings()]


def of_ranks(**env):
    return run_with_megatron(refits, 2, setup=find_nemo_rl, env={"NEMO_RL_SHAPE": "main", **AUDITED, **env})


def test_a_refit_sends_the_last_step():
    without = of_ranks(MEGAPATCH_DISABLE=PATCH)
    for (old, gathers_without, broken), (fractions, gathers, nothing) in zip(without, of_ranks(), strict=True):
        assert all(0.4 < fraction < 0.6 for fraction in old)
        assert fractions == [0.0] * STEPS
        assert (broken, nothing) == (["gathered-when-read"], [])
        assert gathers == gathers_without  # the forward pass after a refit does not gather again
