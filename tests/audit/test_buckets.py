"""The history of a bucket's gradients."""

from __future__ import annotations

import torch
from rigs.audit import Thing

from megapatch.audit._buckets import is_zero, state_of


def bucket_of(*main_grads):
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in main_grads]
    for parameter, grad in zip(parameters, main_grads, strict=True):
        parameter.main_grad = torch.tensor([grad])
    return state_of(Thing(params=parameters))


def test_a_parameter_that_had_a_gradient_in_one_step_has_had_one():
    state = bucket_of(0.0, 0.0)
    for arrived in ([True, False], [False, True]):
        state.arrived[:] = arrived
        state.note_had()
    assert state.had == [True, True] and state.all_had


def test_a_bucket_is_zero_if_others_than_the_fused_gradient_are():
    state = bucket_of(1.0, 0.0)
    first, second = state.parameters
    assert not is_zero(state, second)
    first.grad_added_to_main_grad = True
    assert is_zero(state, first)
    first.grad_added_to_main_grad = False
    assert not is_zero(state, first)


def test_a_bucket_whose_only_gradient_is_fused_may_have_held_others():
    state = bucket_of(1.0)
    (parameter,) = state.parameters
    parameter.grad_added_to_main_grad = True
    assert not is_zero(state, parameter)
