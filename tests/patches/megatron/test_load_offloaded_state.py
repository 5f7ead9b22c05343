"""megatron.load-offloaded-state: training that continues from a checkpoint of the real dist_checkpointing."""

import copy
import functools
import importlib
import tempfile
from types import SimpleNamespace

import pytest
import torch
from rigs.cells import cells_of
from rigs.diagnosed_code import made_up, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.megatron.offloading import OFFLOADS, offloading, offloading_gpt
from rigs.megatron.options import UNPATCHED, Interrupted, attempt, quick_writer
from rigs.megatron.save import minor

from megapatch.testing import init_parallel, tiny_gpt
from megapatch.testing._model import _gpt_of

AWARE = {"use_precision_aware_optimizer": True}
CASES = {"half": OFFLOADS["half"], "precision-aware": {**OFFLOADS["half"], **AWARE}}
STEPS = range(3, 5)
ADAM = {"lr": 0.05, "use_distributed_optimizer": True, "optim": {"weight_decay": 0.01}}
# Those that this Megatron saves: before 0.16 no buckets, with a step.
FORMATS = ("dp_reshardable", "fully_reshardable") if minor() >= 16 else ("fully_sharded_model_space",)
IN_PLACE = {(kind, dtype): {**ADAM, "dtype": dtype} for kind in FORMATS for dtype in ("bf16", "fp32")}


def tree(model, loading, kind=FORMATS[0]):
    sharded = gpt(model).sharded_state_dict()
    how = {"metadata": {"distrib_optim_sharding_type": kind}} if minor() > 12 else {"sharding_type": kind}
    optimizer = model.optimizer.sharded_state_dict(sharded, is_loading=loading, **how)
    return {"model": sharded, "optimizer": optimizer}


def gpt(model):
    return _gpt_of(model.chunks[0])


def through_checkpoint(saved, template):
    from megatron.core import dist_checkpointing

    if minor() < 16:  # whose checkpoints torch does not read, for they have classes in them, or not write
        return in_memory(saved, template())
    with tempfile.TemporaryDirectory() as folder:
        dist_checkpointing.save(saved, folder)
        return dist_checkpointing.load(template(), folder)


def in_memory(saved, template):
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    if isinstance(template, LocalNonpersistentObject):
        return template.unwrap()
    if isinstance(template, dict):
        return {key: in_memory(value, template.get(key)) for key, value in saved.items()}
    if isinstance(template, list):
        return [in_memory(one, other) for one, other in zip(saved, template, strict=True)]
    saved = getattr(saved, "data", saved)
    return saved.detach().clone() if torch.is_tensor(saved) else copy.deepcopy(saved)


def resumed(options):
    """Return how far a resumed run is from the one that continued, by step."""
    with offloading(options):
        build = functools.partial(offloading_gpt, options, lr=0.01, use_distributed_optimizer=True)
        build = functools.partial(build, optim={"adam_eps": 1e-8, **options})
        model = build()
        for step in range(3):
            model.train_step(step)
        saved = copy.deepcopy(tree(model, loading=False))

        resumed = build()
        for parameter, held in inner_parameters(resumed.optimizer):
            parameter.data.add_(1)  # a new process starts from other weights
            held.data.copy_(parameter.data)
        loaded = through_checkpoint(saved, lambda: tree(resumed, loading=True))
        gpt(resumed).load_state_dict(loaded["model"], strict=False)  # strictly, it asks for Transformer Engine's
        resumed.optimizer.load_state_dict(loaded["optimizer"])
        return distances(model, resumed)


def back_in_place(kind, options):
    """Return how far a model that has gone back to its third step is from one that continued, by step."""
    models = [tiny_gpt(optimizer="adam", **options) for _ in range(2)]
    for model, steps in zip(models, (3, 5), strict=True):
        for step in range(steps):
            model.train_step(step)
    loaded = through_checkpoint(tree(models[0], False, kind), lambda: tree(models[1], True, kind))
    gpt(models[1]).load_state_dict(loaded["model"], strict=False)
    models[1].optimizer.load_state_dict(loaded["optimizer"])
    return distances(*models)


def prepared_for_a_load():
    """Return how far a model goes astray for which a load was prepared, which then failed, by step."""
    models = [tiny_gpt(optimizer="adam", **ADAM, dtype="bf16") for _ in range(2)]
    for model in models:
        model.train_step(0)
    tree(models[1], loading=True)
    return distances(*models)


def distances(model, other):
    expected, found = ([each.train_step(step) and each.parameters() for step in STEPS] for each in (model, other))
    return [
        max((one[name] - other[name]).abs().max().item() for name in one)
        for one, other in zip(expected, found, strict=True)
    ]


def inner_parameters(optimizer):
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from each.optimizer.param_to_inner_param.items()


def job(rank, world_size):
    init_parallel()
    quick_writer()
    for name, options in CASES.items():
        yield name, functools.partial(attempt, resumed, options)
    for (kind, dtype), options in IN_PLACE.items():
        yield (kind, dtype), functools.partial(attempt, back_in_place, kind, options)
    yield "prepared", functools.partial(attempt, prepared_for_a_load)
    yield "diagnoses", diagnoses


# ------------------------------------------------------------------------------------------ the diagnosis
def of_all(self):
    for parameter, held in self.param_to_inner_param.items():
        if parameter not in self.param_to_fp32_param or self.param_update_in_fp32:
            held.data.copy_(self.state[parameter]["master_param"])


def syncs_at_last(self, state):
    self.optimizer._sync_hdo_state_to_sub_optimizers()


def diagnoses():
    from megapatch.patches.megatron.load_offloaded_state import LOAD_BUCKETS, diagnose

    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    hybrid, optimizer = module.HybridDeviceOptimizer, module.DistributedOptimizer
    update = "_update_fp32_params_by_new_state"
    load = next(name for name in LOAD_BUCKETS if hasattr(optimizer, name))
    changes = {
        **made_up(hybrid, update, of_all),
        "repaired": [(hybrid, update, of_all), (optimizer, load, syncs_at_last)],
    }
    return verdicts_of(diagnose, module, changes)


DIAGNOSES = {
    "of_all": ("needed", "the step count of before"),
    "repaired": ("fixed", "reaches the copies"),
}


# ------------------------------------------------------------------------------------------ the checks
unpatched = cells_of(job, 1, env=UNPATCHED)
patched = cells_of(job, 1)


@pytest.mark.quick
def test_without_the_patch_loading_fails_or_training_continues_from_another_step(unpatched):
    error, text = unpatched["half"]
    assert (error, text[:7]) == ("KeyError", "tensor(")
    error, differences = unpatched["precision-aware"]
    assert error is None
    if minor() < 16:  # its format takes over no step, and updates the copies
        assert differences == [0.0] * len(STEPS)
    else:
        assert min(differences) > 1e-3


@pytest.mark.parametrize("case", IN_PLACE, ids=" ".join)
def test_without_the_patch_a_load_in_place_raises_or_keeps_adams_step(unpatched, case):
    error, found = unpatched[case]
    if case == ("dp_reshardable", "bf16"):
        assert error is None and min(found) > 1e-3
    elif case == ("dp_reshardable", "fp32"):
        assert (error, "view of a leaf" in found) == ("RuntimeError", True)
    else:
        assert (error, found) == ("KeyError", "'step'")


def test_without_the_patch_preparing_a_load_spoils_adams_step(unpatched):
    error, distances = unpatched["prepared"]
    assert error is None and max(distances) > 1e-3


@pytest.mark.parametrize("case", [*IN_PLACE, "prepared"], ids=str)
def test_a_model_that_goes_back_in_place_equals_one_that_continued(patched, case):
    assert patched[case] == (None, [0.0] * len(STEPS))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick
def test_a_resumed_run_equals_one_that_continued(patched, name):
    assert patched[name] == (None, [0.0] * len(STEPS))


def test_diagnosis(patched):
    assert_verdicts(patched["diagnoses"], DIAGNOSES)


def test_what_a_state_has_and_a_checkpoint_has_not_is_set_all_the_same():
    """Megatron sets each tensor of an offloaded parameter's state: the master parameter is the loaded one."""
    from megapatch.patches.megatron.load_offloaded_state import SYNC, set_all_but_the_step

    model, main, loaded, moment = torch.zeros(4).unbind()
    state = {"exp_avg": torch.zeros(()), "master_param": torch.zeros(())}
    hybrid = SimpleNamespace(
        state={main: state}, param_groups=[{"params": [main]}], param_to_inner_param={main: main}, **{SYNC: None}
    )
    optimizer = SimpleNamespace(optimizer=hybrid, model_param_group_index_map={model: (0, 0)})
    got = {}
    set_all_but_the_step(lambda self, parameter, tensors: got.update(tensors))(
        optimizer, model, {"param": loaded, "exp_avg": moment}
    )
    assert got.keys() == {"param", "exp_avg", "master_param"}
    assert got["master_param"] is got["param"] is loaded and got["exp_avg"] is moment


class StepsItself(torch.optim.AdamW):
    """Has one step count for all of its parameters."""

    def step(self):
        pass


class IsAdams(torch.optim.AdamW):
    """Is stepped by torch's AdamW."""


def with_one_step(kind, step):
    """Return an optimizer of some parameters whose state has this step, and of one without state."""
    inner = kind([torch.zeros(1) for _ in range(3)])
    (group,) = inner.param_groups
    for parameter in group["params"][:2]:
        inner.state[parameter] = {"step": step}
    inner.state[group["params"][2]] = {}
    return inner


def steps_of(inner):
    return [state["step"] for state in inner.state.values() if state]


@pytest.mark.parametrize(
    ("kind", "is_own"),
    [(torch.optim.Adam, True), (torch.optim.AdamW, True), (IsAdams, True), (StepsItself, False)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_parameter_has_a_step_of_its_own_where_torch_counts(kind, is_own):
    from megapatch.patches.megatron.load_offloaded_state import give_each_its_step, set_all_but_the_step

    def sharded_state_dict(self, is_loading=False):
        raise Interrupted  # a load that fails once it is prepared

    for is_loading in (True, False):
        optimizer = SimpleNamespace(optimizer=with_one_step(kind, torch.tensor(2.0)))
        with pytest.raises(Interrupted):
            give_each_its_step(sharded_state_dict)(optimizer, is_loading=is_loading)
        first, second = steps_of(optimizer.optimizer)
        assert (first is not second) is (is_own and is_loading) and first == second == 2

    for step in (torch.tensor(2.0), 2.0):
        inner, got = with_one_step(kind, step), {}
        optimizer = SimpleNamespace(optimizer=inner, model_param_group_index_map={"name": (0, 0)})
        set_all_but_the_step(lambda self, parameter, tensors, got=got: got.update(tensors))(optimizer, "name", {})
        first, second = steps_of(inner)
        assert got["step"] is first and second is step
        assert (first is not step) is (is_own and torch.is_tensor(step)) and first == 2
