"""Train on rollouts as they arrive, a few at a time, and step the optimizer when all of them are there.

    python examples/accumulate_rollouts.py

Runs on CPU, on two ranks, in seconds: Megatron's GPT in DistributedDataParallel with overlap_grad_reduce, once
with all rollouts in one call, and once with the step split over several calls. Needs the extra `demo`
(in a checkout: pip install ".[demo]").
"""

from __future__ import annotations

import random

import torch

import megapatch
from megapatch.testing import init_parallel, run_ranks, tiny_gpt

STEPS, ROLLOUTS = 3, 8


def arriving(step, rollouts):
    """Yield the rollouts of a step, a few at a time. Ranks wait for their peers only at its end."""
    chance = random.Random(step)
    while rollouts:
        size = chance.randint(1, 3)
        yield rollouts[:size]
        rollouts = rollouts[size:]


def forward_step(microbatches, model):
    """Run the model on one microbatch: Megatron's forward step function, with a loss per token."""
    tokens = next(microbatches)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    batch, length = inputs.shape
    positions = torch.arange(length).expand(batch, -1)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

    def loss_of(losses):
        number = torch.tensor(losses.numel(), dtype=torch.int)
        return losses.sum(), number, {"loss": torch.stack([losses.detach().sum(), number.float()])}

    return model(inputs, positions, hidden, labels=labels), loss_of


def train(rank, world_size, split):
    """Return for each step the sizes of its calls and the gradient's norm; and the parameters after the last."""
    init_parallel()
    model = tiny_gpt(overlap_grad_reduce=True, per_token_loss=True)
    found = []
    for number in range(STEPS):
        rollouts = model.microbatches(number, ROLLOUTS)
        with megapatch.TrainStep(model.chunks, model.optimizer) as step:
            calls = []
            for group in arriving(number, rollouts) if split else [rollouts]:
                step.forward_backward(
                    forward_step_func=forward_step,
                    data_iterator=iter(group),
                    num_microbatches=len(group),
                    seq_length=model.seq,
                    micro_batch_size=len(group[0]),
                )
                calls.append(len(group))
            result = step.finish()
        found.append((calls, result.grad_norm))
    return found, model.parameters()


def main() -> None:
    (at_once, expected), (in_calls, parameters) = (run_ranks(train, 2, split)[0] for split in (False, True))
    for number, ((_, norm), (calls, split_norm)) in enumerate(zip(at_once, in_calls, strict=True)):
        print(f"step {number}: {ROLLOUTS} microbatches in calls of {calls}")
        print(f"  gradient norm {split_norm:.6f}, in one call {norm:.6f}")
    largest = max(float((parameters[name] - expected[name]).abs().max()) for name in expected)
    print(f"largest difference of a parameter after {STEPS} steps: {largest:.1e}")


if __name__ == "__main__":
    main()
