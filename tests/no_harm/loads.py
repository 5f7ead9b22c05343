"""Programs of loads: of weights and optimizers, whole and in part, there and back, of one model of several."""

from __future__ import annotations

import copy
from functools import partial

import torch
from rigs.megatron.save import minor

from .layouts import DENSE, EVERY, HALF, OVERLAPPED
from .steps import WRONG
from .table import program
from .trainer import Trainer, is_weight, parts_of, scaled

TAKEN_OVER = ("main parameters", "weights", "parameters")
"""What differs where weights were loaded and the main parameters follow."""
SCHEDULE = ("learning rate", "weight decay", "schedule")


def _loaded_and_trained_on(trainer, change=lambda weights: weights, load=Trainer.load, **options):
    """Load weights of a step before, or what `change` makes of them, and train on."""
    trainer.train(0)
    weights = change(trainer.weights())
    trainer.train(1)
    load(trainer, weights, **options)
    trainer.optimizer.reload_model_params()
    trainer.train(2)


@program(*(name for name in EVERY if name != "offloaded"))
def weights_and_then_reload_model_params(run):
    _loaded_and_trained_on(run.trainer())


@program("offloaded", changed={"megatron.reload-offloaded-params": TAKEN_OVER})
def weights_and_then_reload_model_params_of_an_offloaded_optimizer(run):
    _loaded_and_trained_on(run.trainer())


@program("fp32", *HALF, "bf16, overlapped reduce", "pp, vpp", "moe")
def rolled_back_in_memory_weights_first(run):
    _rolled_back_in_memory(run, Trainer.load, Trainer.load_optimizer)


@program("fp32", *HALF)
def rolled_back_in_memory_optimizer_first(run):
    _rolled_back_in_memory(run, Trainer.load_optimizer, Trainer.load)


def _rolled_back_in_memory(run, *loads):
    trainer = run.trainer()
    trainer.train(0)
    saved = {Trainer.load: trainer.weights(), Trainer.load_optimizer: trainer.optimizer_state()}
    trainer.train(1, 2)
    for load in loads:
        load(trainer, saved[load])
    trainer.train(3)


@program(*DENSE, "fp16, sharded", "bf16, sharded", "tp")
def the_optimizer_alone_is_loaded(run):
    trainer = run.trainer()
    trainer.train(0)
    state = trainer.optimizer_state()
    trainer.train(1)
    trainer.load_optimizer(state)
    trainer.train(2)


@program("fp32", "bf16", "bf16, sharded, overlaps", "tp")
def part_of_the_weights_and_then_reload_model_params(run):
    def half_of_the_embedding(weights):
        half = scaled(weights, 0.5)
        return [{name: value for name, value in state.items() if "embedding" in name} for state in half]

    _loaded_and_trained_on(run.trainer(), half_of_the_embedding, strict=False)


@program("fp32", "bf16", "bf16, sharded", "bf16, sharded, overlaps")
def an_adapter_over_a_frozen_base(run):
    """As with LoRA: only the adapter is trained, saved and loaded. For a rollout it is merged into the base."""
    trainer = run.trainer(frozen=("embedding*", "*norm*", "*attention*", "output*"))

    def adapter(weights):
        return [
            {name: value for name, value in state.items() if "mlp.linear" in name and is_weight(value)}
            for state in weights
        ]

    _loaded_and_trained_on(trainer, adapter, strict=False)
    base = [each for each in trainer.parameters() if not each.requires_grad]
    kept = [each.detach().clone() for each in base]
    for parameter in base:
        parameter.data.mul_(1.5)
    trainer.evaluate(100)
    for parameter, value in zip(base, kept, strict=True):
        parameter.data.copy_(value)
    trainer.train(3)


@program("fp32", *HALF, "pp, tied")
def an_average_of_weights_is_evaluated(run):
    """An exponential moving average, kept in Python."""
    trainer = run.trainer()
    average = trainer.weights()
    for data in range(3):
        trainer.train(data)
        mine = trainer.weights()
        for state, new in zip(average, mine, strict=True):
            for name in filter(lambda name: is_weight(state[name]), state):
                state[name].mul_(0.9).add_(new[name], alpha=0.1)
        trainer.load(average)
        trainer.evaluate(100)
        trainer.load(mine)


@program("pp, tied", "tp")
def tied_embeddings_are_loaded(run):
    _loaded_and_trained_on(run.trainer(tied_embeddings=True))


@program("bf16", "fp16", "bf16, sharded", "bf16, sharded, overlaps", "ep")
def weights_of_another_dtype(run):
    def in_double(weights):
        return [
            {name: value.double() if is_weight(value) else value for name, value in state.items()}
            for state in weights
        ]

    _loaded_and_trained_on(run.trainer(), in_double)


@program("fp32", "bf16", "bf16, sharded, overlaps", "tp")
def loaded_between_zero_grad_and_the_forward_pass(run):
    trainer = run.trainer()
    trainer.train(0)
    saved = trainer.weights()
    trainer.train(1)
    trainer.model.zero_grad()
    trainer.load(saved)
    trainer.optimizer.reload_model_params()
    trainer.backward(2)
    trainer.update()


@program("bf16", "bf16, sharded", "bf16, sharded, overlaps", "ep")
def loaded_in_a_thread(run):
    _loaded_and_trained_on(run.trainer(), load=partial(run.in_thread, Trainer.load))


@program("bf16", "bf16, sharded, overlaps", "tp")
def loaded_under_no_grad_and_in_inference_mode(run):
    trainer = run.trainer()
    trainer.train(0)
    saved = trainer.weights()
    with torch.no_grad():
        trainer.load(scaled(saved, 0.5))
        trainer.evaluate(100)
    with torch.inference_mode():
        trainer.load(saved)
    trainer.optimizer.reload_model_params()
    trainer.train(2)


@program(*DENSE, *OVERLAPPED, "tp", "moe", "ep", "pp")
def a_reference_swapped_in_and_out(run):
    trainer = run.trainer()
    for data in range(2):
        trainer.train(data)
        mine = trainer.weights()
        trainer.load(scaled(mine, 0.5))
        trainer.evaluate(100)
        trainer.load(mine)
    trainer.train(2)


@program("fp32", "bf16", "bf16, sharded", "tp", "ep")
def a_reference_swapped_by_data(run):
    """By `.data`, of another tensor, and back to the one in the buffer."""
    trainer = run.trainer()
    for data in range(2):
        trainer.train(data)
        mine = [parameter.data for parameter in trainer.parameters()]
        for parameter in trainer.parameters():
            parameter.data = parameter.data * 0.5
        trainer.evaluate(100)
        for parameter, tensor in zip(trainer.parameters(), mine, strict=True):
            parameter.data = tensor
    trainer.train(2)


@program("bf16", "fp16", "bf16, sharded", "ep")
def a_reference_swapped_by_main_parameters(run):
    trainer = run.trainer()
    trainer.train(0)
    for factor in (0.5, 2.0):
        for part in parts_of(trainer.optimizer):
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    main.data.mul_(factor)
            part._copy_main_params_to_model_params()
            if hasattr(part, "gbuf_ranges"):
                for chunk in trainer.model.chunks:
                    chunk.start_param_sync(force_sync=True)
        trainer.evaluate(100)
    trainer.train(1)


@program("fp32", *HALF, "pp, vpp")
def two_models_of_which_one_loads(run):
    actor, critic = run.trainer(), run.trainer()
    actor.train(0)
    critic.train(0)
    saved = critic.weights()
    for data in (1, 2):
        actor.train(data)
        critic.train(data)
        critic.load(saved)
        critic.optimizer.reload_model_params()
    actor.train(3)


@program("bf16", "bf16, sharded, overlaps")
def three_models_of_which_one_loads_the_others_weights(run):
    policy, reference, critic = run.trainer(), run.trainer(), run.trainer()
    for data in range(2):
        policy.train(data)
        critic.train(data + 10)
        reference.load(policy.weights())
        reference.evaluate(100)
    policy.train(2)


@program("fp32", "bf16", "bf16, sharded", "moe")
def a_load_that_raises_and_training_that_continues(run):
    trainer = run.trainer()
    trainer.train(0)
    saved = trainer.weights()
    name = next(name for name in saved[0] if "embedding" in name)
    run.raising(trainer.load, [{**saved[0], name: saved[0][name][:-1]}])
    run.raising(trainer.load, [{key: value for key, value in saved[0].items() if key != name}])
    trainer.load(saved)
    trainer.train(1)


# ------------------------------------------------------------------------------------ other weights for a while


def quantized(weights, levels):
    """Round each weight to this many steps on each side of zero."""

    def rounded(value):
        scale = value.abs().max().clamp(min=1e-8) / levels
        return (value / scale).round() * scale

    return [
        {name: rounded(value) if is_weight(value) else value for name, value in state.items()} for state in weights
    ]


@program("fp32", *HALF)
def trained_on_quantized_weights(run):
    """Quantized weights are loaded before each forward pass; the optimizer has them in full precision."""
    trainer = run.trainer()
    for data in range(3):
        trainer.load(quantized(trainer.weights(), levels=7))
        trainer.model.zero_grad()
        trainer.backward(data)
        trainer.update()


def _another_policy_evaluated_between_backward_and_step(run, load):
    """The step restores the policy: it writes the main parameters into the model."""
    trainer = run.trainer()
    old = scaled(trainer.weights(), 0.9)
    for data in range(3):
        trainer.model.zero_grad()
        trainer.backward(data)
        load(trainer, old)
        trainer.evaluate(100)
        trainer.update()


@program(*(name for name in HALF if name != "bf16, sharded, overlaps"))
def another_policy_evaluated_between_backward_and_step(run):
    _another_policy_evaluated_between_backward_and_step(run, Trainer.load)


@program(*(name for name in HALF if name != "bf16, sharded, overlaps"))
def the_policy_of_a_checkpoint_evaluated_between_backward_and_step(run):
    _another_policy_evaluated_between_backward_and_step(run, Trainer.load_as_read)


@program("bf16, sharded, overlaps", changed={"megatron.gathered-when-read": WRONG})
def another_policy_evaluated_between_backward_and_step_before_a_gather(run):
    """An evaluation there is a finding of its own: see `evaluation inside a step before a gather`."""
    _another_policy_evaluated_between_backward_and_step(run, Trainer.load)


@program("bf16", "fp16", "bf16, sharded", "bf16, sharded, overlaps", "ep")
def optimizer_state_read_while_a_reference_is_in(run):
    trainer = run.trainer()
    trainer.train(0)
    mine = trainer.weights()
    trainer.load(scaled(mine, 0.5))
    run.note("state", str(copy.deepcopy(trainer.optimizer.state_dict())))
    trainer.load(mine)
    trainer.train(1, 2)


# ------------------------------------------------------------------------------------ meant to differ
@program(
    "fp32",
    "bf16, sharded",
    changed={"megatron.scheduler-after-load": (*TAKEN_OVER, *SCHEDULE)},
)
def the_schedule_is_loaded_in_place(run):
    trainer = run.trainer()
    trainer.train(0)
    saved = copy.deepcopy(trainer.schedule.state_dict())
    trainer.train(1)
    trainer.schedule.load_state_dict(saved)
    trainer.train(2)


@program("fp32", changed={"megatron.scheduler-after-load": SCHEDULE})
def a_schedule_without_one_of_its_keys(run):
    trainer = run.trainer()
    trainer.train(0)
    saved = trainer.schedule.state_dict()
    del saved["end_wd"]
    run.raising(trainer.schedule.load_state_dict, saved)


if minor() < 19:  # from then on a load tells such groups apart

    @program("bf16, sharded", changed={"megatron.rates-of-each-group": (*TAKEN_OVER, SCHEDULE[0])})
    def resumed_with_a_rate_of_its_own_for_the_embedding(run):
        options = {"optim": {"weight_decay": 0.01, "min_lr": 0.0, "decoupled_lr": 0.5}}
        first = run.trainer(**options)
        first.train(0)
        second = run.trainer(**options)
        second.load_as_read(first.weights())
        second.load_optimizer(first.optimizer_state())
        second.train(1)


def _a_new_model_loads_trained_weights_alone(run, load):
    trained = run.trainer()
    trained.train(0, 1)
    trainer = run.trainer()
    for parameter in trainer.parameters():  # random weights
        parameter.data.normal_()
    trainer.optimizer.reload_model_params()
    load(trainer, trained.weights())
    trainer.train(2)


@program(*HALF)
def a_new_model_loads_trained_weights_from_memory(run):
    """They are lent, for all that one can know: the step writes the main parameters over them."""
    _a_new_model_loads_trained_weights_alone(run, Trainer.load)


@program(*HALF, changed={"megatron.main-params-after-load": TAKEN_OVER})
def a_new_model_loads_trained_weights_of_a_checkpoint(run):
    _a_new_model_loads_trained_weights_alone(run, Trainer.load_as_read)


@program(
    "bf16, sharded, overlaps",
    "fp32, sharded, overlaps",
    changed={"megatron.gathered-when-read": ("read",)},
)
def parameters_read_right_after_a_step(run):
    trainer = run.trainer()
    trainer.train(0)
    state = trainer.model.chunks[0].sharded_state_dict()
    run.note("read", {name: each.data for name, each in state.items() if is_weight(getattr(each, "data", None))})
    trainer.train(1)
