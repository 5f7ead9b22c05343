"""Parts of the audit, each alone: what is counted, what is excused, and what is nobody's fault."""

from __future__ import annotations

import os

import pytest
import torch
from rigs.audit import Thing, part_of, watcher_of
from torch.nn.modules import module as hooks

import megapatch
from megapatch._python import places
from megapatch.audit import _findings
from megapatch.audit._audit import Call, Part, Step
from megapatch.audit._chunks import state_of
from megapatch.audit._gradients import Gradients
from megapatch.audit._saves import Saves
from megapatch.audit._scaled_once import ScaledOnce
from megapatch.audit._training_mode import TrainingMode
from megapatch.audit._weight_syncs import WeightSyncs
from megapatch.patches.megatron.dropped_models_freed import refer_weakly


def rules(watching):
    return [finding.rule for finding in watching.ledger.findings()]


# ------------------------------------------------------------------------ gradients
class Chunk:
    """One bucket of one parameter."""

    def __init__(self, **config):
        self.parameter = torch.nn.Parameter(torch.ones(1))
        self.bucket = Thing(params=[self.parameter], gradient_scaling_factor=1.0)
        group = Thing(buckets=[self.bucket], param_to_bucket={self.parameter: self.bucket})
        self.bucket_groups, self.expert_parallel_bucket_groups = [group], []
        self.param_to_bucket_group = {self.parameter: group}
        self.buffer = Thing(buckets=[self.bucket])
        self.config = Thing(**config)


def arrive(gradients, chunk):
    """Run the hook that DistributedDataParallel is given for the chunk's parameter."""
    gradients.watch_arrivals(lambda chunk, parameter: lambda *unused: None)(chunk, chunk.parameter)()


@pytest.mark.parametrize("arrivals", [0, 1, 2])
def test_a_step_has_used_a_gradient_that_came_once_or_more(watching, arrivals):
    gradients, chunk = part_of(watching, Gradients), Chunk()
    for _ in range(arrivals):
        arrive(gradients, chunk)
    gradients.end_step(Step(torch.nn.Module(), [chunk]))
    assert state_of(chunk.bucket).stepped == (arrivals > 0)


def test_a_parameter_without_a_bucket_is_not_looked_at(watching, caplog):
    def hook():
        pass

    make = part_of(watching, Gradients).watch_arrivals(lambda chunk, parameter: hook)
    chunk = Chunk()
    assert make(chunk, torch.nn.Parameter(torch.ones(1))) is hook
    assert make(chunk, chunk.parameter) is not hook
    assert not caplog.records


def test_gradients_that_are_changed_by_hand_are_known_where_hooks_hold_their_model_weakly(watching):
    gradients, chunk = part_of(watching, Gradients), Chunk()
    chunk.module = Thing(named_parameters=lambda: [("parameter", chunk.parameter)])
    chunk.parameter.main_grad = torch.ones(1)
    make = refer_weakly(gradients.watch_arrivals(lambda chunk, parameter: lambda *unused: None))
    hook, state = make(chunk, chunk.parameter), state_of(chunk.bucket)
    for by_hand in (False, True):
        if by_hand:
            gradients._by_hand.add(chunk)
        state.stepped, state.late = True, None
        hook()
        assert (state.late is None) == by_hand


@pytest.mark.parametrize("handles", [False, True])
def test_gradients_that_are_zeroed_while_an_exception_is_handled_are_dropped_on_purpose(watching, handles):
    gradients, chunk = part_of(watching, Gradients), Chunk()
    arrive(gradients, chunk)
    try:
        raise ValueError
    except ValueError:
        if handles:
            gradients.zeroed(chunk.buffer)
    if not handles:
        gradients.zeroed(chunk.buffer)
    assert state_of(chunk.bucket).dropped == (not handles)


# ------------------------------------------------------------------------ scales
@pytest.mark.parametrize(
    ("config", "has"),
    [
        ({"num_moe_experts": 2, "moe_aux_loss_coeff": 0.1}, True),
        ({"num_moe_experts": 2, "moe_z_loss_coeff": 0.1}, True),
        ({"num_moe_experts": 2, "moe_aux_loss_coeff": 0}, False),
        ({"num_moe_experts": 2, "moe_aux_loss_coeff": 0.1, "moe_grad_scale_func": lambda: 1}, False),
        ({"num_moe_experts": None, "moe_aux_loss_coeff": 0.1}, False),
        ({"mtp_num_layers": 1}, True),
        ({"mtp_num_layers": 1, "mtp_grad_scale_func": lambda: 1}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("scale", [None, max])
@pytest.mark.parametrize("trains", [True, False])
def test_losses_that_were_not_scaled_are_those_of_one_step_and_of_calls_that_train(
    watching, config, has, trains, scale
):
    scales, chunks = part_of(watching, ScaledOnce), [Chunk(**config, grad_scale_func=scale) for _ in range(2)]
    scales.begin_call(Call(chunks, trains))
    assert {chunk in scales._unscaled_losses for chunk in chunks} == {has and trains and scale is None}
    is_scaled_by_itself = any(name.endswith("_grad_scale_func") for name in config)
    assert watching.ledger.judged["scaled-once calls"] == (trains and (has or is_scaled_by_itself))
    scales.end_step(Step(chunks[0], chunks))
    assert not scales._unscaled_losses


# ------------------------------------------------------------------------ modes
class Model(torch.nn.Module):
    """A chunk, in its wrapper."""

    def __init__(self, rate, mode=True, **config):
        super().__init__()
        self.module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(rate)).train(mode)
        self.config = Thing(**config)


@pytest.mark.parametrize("corrects", [False, True], ids=["stays", "is corrected"])
@pytest.mark.parametrize("trains", [True, False])
def test_a_call_in_the_wrong_mode_is_noted_unless_it_changes_the_mode_and_no_module_has_a_hook(
    watching, corrects, trains
):
    part, wrapper = part_of(watching, TrainingMode), Model(0.5, mode=not trains)
    train = watcher_of(part, "Module.train")(torch.nn.Module.train)
    call = Call([wrapper], trains)
    part.begin_call(call)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in wrapper.modules())
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks
    if corrects:
        train(wrapper)
    part.end_call(call)
    rule = "training-mode" if trains else "evaluation-mode"
    assert [note.rule for note in watching.ledger.notes()] == [rule] * (not corrects)
    assert watching.ledger.judged == {rule: 1} and not part._suspected


@pytest.mark.parametrize(
    ("rate", "config", "drops"),
    [
        (0.5, {}, True),
        (0.0, {}, False),
        (0.0, {"hidden_dropout": 0.1}, True),
        (0.0, {"attention_dropout": 0.1}, True),
        (0.0, {"hidden_dropout": 0.0}, False),
        (0.0, {"num_moe_experts": 2, "moe_z_loss_coeff": 0.1}, False),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_the_mode_counts_where_something_is_dropped_or_a_router_has_losses(watching, rate, config, drops, trains):
    part, models = part_of(watching, TrainingMode), [Model(0.0), Model(rate, **config)]
    watching.models.add(models)
    part.begin_call(Call(models, trains))
    has_losses = "moe_z_loss_coeff" in config
    assert part.drops() == drops and sum(watching.ledger.judged.values()) == (drops or (trains and has_losses))


# ------------------------------------------------------------------------ checkpoints
class Strategy:
    pass


@pytest.mark.parametrize(("keeps", "planned"), [(True, True), (False, True), (True, False)])
def test_another_structure_is_found_where_a_plan_is_kept_and_was_made(watching, keeps, planned):
    saves, strategy = part_of(watching, Saves), Strategy()
    before = saves._compare(strategy, {"one": 1}, keeps, planned)
    saves._note_saved(before, None, strategy)
    saves._compare(strategy, {"one": 1, "two": 2}, keeps, planned)
    assert rules(watching) == ["saved-what-is"] * (keeps and planned)
    assert watching.ledger.judged["saved-what-is plans"] == (keeps and planned)


# ------------------------------------------------------------------------ weights
@pytest.mark.parametrize(
    ("loaded", "options", "wrong"),
    [
        ("ref", {}, True),
        ("ref", {"colocate": True}, False),
        ("ref", {"offload_train": True}, False),
        ("actor", {}, False),
    ],
)
def test_slimes_weights_are_compared_where_another_model_was_loaded_and_is_sent(watching, loaded, options, wrong):
    actor = Thing(
        _active_model_tag=loaded,
        args=Thing(**{"offload_train": False, "colocate": False, **options}),
        weights_backuper=Thing(
            get={"actor": {"w": torch.ones(2)}}.get, _source_getter=lambda: [("w", torch.zeros(2))]
        ),
    )
    part_of(watching, WeightSyncs)._compare_with_copy(actor)
    assert rules(watching) == ["weights-synced"] * wrong


# ------------------------------------------------------------------------ findings
class Buggy(Part):
    @_findings.observes
    def look(self):
        raise KeyError("a bug")

    def begin_call(self, call):
        """As all parts see calls: nothing has to be said for it to be guarded."""
        raise KeyError("a bug")


def test_a_bug_of_the_audit_is_told_once(watching, caplog):
    part = Buggy(watching)
    assert [part.look(), part.look(), part.begin_call(None), part.begin_call(None)] == [None] * 4
    for record, name in zip(caplog.records, ("look", "begin_call"), strict=True):
        assert f"{name} failed, and finds nothing" in record.getMessage()
        assert record.exc_info[0] is KeyError


@pytest.mark.parametrize(
    ("file", "is_machinery"),
    [
        ("/lib/megatron/core/optimizer/optimizer.py", True),
        ("/lib/torch/nn/modules/module.py", True),
        (os.path.join(os.path.dirname(megapatch.__file__), "audit", "_calls.py"), True),
        ("<frozen importlib._bootstrap>", True),
        ("/lib/megatron/training/training.py", False),
        ("/home/me/core/train.py", False),
        ("/home/me/megatron/train.py", False),
    ],
)
def test_whose_code_a_finding_names(file, is_machinery):
    assert places.is_machinery(file) == is_machinery


def test_parameters_are_named_in_the_models_order():
    """A bucket has a set of them, in another order on each rank."""
    named = [(name, torch.nn.Parameter(torch.ones(1))) for name in "abc"]
    parameters = [parameter for _, parameter in named]
    assert _findings.describe(parameters[:0:-1], named) == "b and 1 more"
    assert _findings.describe(parameters[2:], named) == "c"
    assert _findings.describe(parameters, []) == "a parameter that the model no longer has and 2 more"
