"""saved-what-is: checkpoints of the real dist_checkpointing that lack something, at 2 ranks."""

from __future__ import annotations

from functools import partial

import pytest
from rigs.audit import found
from rigs.cells import AUDITED, run_cells
from rigs.megatron.options import BOTH, UNPATCHED
from rigs.megatron.save import BASE, SHARED, STATE_ON_ONE, Saves, prepare

from megapatch import audit
from megapatch.testing import init_parallel, tiny_gpt

MODELS = {
    "dp2": ({}, BOTH),
    "pp2, tied": ({"pp": 2}, {"tied_embeddings": True}),
    "tp2": ({"tp": 2}, {}),
    "ep2": ({"ep": 2}, {"experts": 2}),
    "pp2 vpp2": ({"pp": 2, "vpp": 2}, {}),
}
CHANGES = {"unchanged": (BASE, BASE), "added on one rank": (BASE, STATE_ON_ONE)}
PARALLEL = {"unchanged": (BASE, BASE), "added": (BASE, SHARED)}


def saved(layout, options, folder, rank, complete):
    """Save a model, whole or without the layer norms before attention."""
    init_parallel(**layout)
    model = tiny_gpt(layers=4, **options)
    model.gather_parameters()
    tree = {}
    for number, chunk in enumerate(model.chunks):
        tree[f"model{number}"] = part = chunk.sharded_state_dict()
        for name in [name for name in part if name.endswith("input_layernorm.weight") and not complete]:
            del part[name]
    audit.clear()
    Saves(rank, folder).plan_tree(tree)
    return found()


def saved_beside_an_offloaded_one(folder, rank):
    """An actor is saved while its critic's parameter buffers are empty, as by verl's offload."""
    init_parallel()
    critic, actor = tiny_gpt(**BOTH), tiny_gpt(**BOTH)
    actor.gather_parameters()
    for buffer in critic.chunks[0].buffers:
        buffer.param_data.untyped_storage().resize_(0)
    audit.clear()
    Saves(rank, folder).plan_tree({"model": actor.chunks[0].sharded_state_dict()})
    return found()


def changed(folder, rank, parallel, before, after):
    """Plan one structure often, and then another."""
    audit.clear()
    saves = Saves(rank, folder, parallel=parallel)
    saves.plan_often(before)
    saves.plan(after)
    return found()


def job(rank, world_size, folder):
    prepare()
    for name, parts in CHANGES.items():
        yield name, partial(changed, folder, rank, False, *parts)
    for name, parts in PARALLEL.items():
        yield ("parallel", name), partial(changed, folder, rank, True, *parts)
    for name, model in MODELS.items():
        for complete in (True, False):
            yield (name, complete), partial(saved, *model, folder, rank, complete)
    yield "beside an offloaded one", partial(saved_beside_an_offloaded_one, folder, rank)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_cells(job, 2, str(tmp_path_factory.mktemp("saves")), env={**UNPATCHED, **AUDITED})


@pytest.mark.parametrize("model", MODELS)
def test_a_parameter_that_is_not_in_the_checkpoint_is_found(ranks, model):
    for cells in ranks:
        assert cells[model, True] == []
        ((rule, what),) = cells[model, False]
        assert rule == "saved-what-is"
        assert "input_layernorm.weight" in what


def test_a_plan_that_is_kept_for_another_structure_is_found_on_the_rank_that_has_changed(ranks):
    assert [cells["unchanged"] for cells in ranks] == [[], []]
    assert [[rule for rule, _ in cells["added on one rank"]] for cells in ranks] == [[], ["saved-what-is"]]
    assert "new" in ranks[1]["added on one rank"][0][1]


def test_a_distribution_that_is_kept_is_found(ranks):
    assert [cells["parallel", "unchanged"] for cells in ranks] == [[], []]
    assert all(cells["parallel", "added"] for cells in ranks)


def test_an_offloaded_model_is_not_missed(ranks):
    for cells in ranks:
        assert cells["beside an offloaded one"] == []
