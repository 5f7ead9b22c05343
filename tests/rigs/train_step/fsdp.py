"""A tiny model on FSDP2, its data, and reference steps in one process without FSDP2, for tests of TrainStep."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megapatch.train_step import TrainStep

LEARNING_RATE, DECAY, GAMMA = 0.1, 0.01, 0.5


class Interrupted(Exception):
    """Raised by tests in the middle of a pass."""


class Tiny(nn.Module):
    """Layers that are sharded one by one, and parameters of the root, one of which has a single element."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, 7) for size in (5, 7, 7))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(7, 3)
        self.raises_in = None  # or "forward", "backward"

    def forward(self, values):
        values = values.to(self.scale.dtype)
        for layer in self.layers:
            values = torch.tanh(layer(values))
            if layer is self.layers[1] and self.raises_in:
                interrupt(values, self.raises_in)
        return self.head(values * self.scale)


def interrupt(values, where):
    def raises(gradient):
        raise Interrupted

    if where == "forward":
        raise Interrupted
    values.register_hook(raises)


def plain_model():
    torch.manual_seed(1)
    return Tiny().double().to(device())


def device():
    return "cuda" if torch.cuda.is_available() else "cpu"  # never with the CUDA stubs


def device_mesh(shape, *names):
    return init_device_mesh(device(), shape, mesh_dim_names=names)


def sharded_model(mesh=None, dtype=torch.float64):
    model = plain_model().to(dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def optimizers(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, weight_decay=DECAY)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)


def microbatches(step, rank, count):
    """Return (inputs, targets, weight of each element) for each microbatch."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank)
    return [
        (
            torch.randn(2, 5, generator=generator).double().to(device()),
            torch.randn(2, 3, generator=generator).double().to(device()),
            torch.randint(0, 3, (2, 3), generator=generator).to(device()),
        )
        for _ in range(count)
    ]


def loss_of(output, targets, counts, counting):
    errors = (output - targets) ** 2
    return (errors * counts).sum() if counting else errors.mean()


def forward_step(counting, raises_in_loss=False):
    def function(data, model):
        inputs, targets, counts = next(data)

        def loss_function(output):
            if raises_in_loss:
                raise Interrupted
            loss = loss_of(output, targets, counts, counting)
            return loss, {"loss": float(loss.detach())}

        return model(inputs), loss_function

    return function


class Sharded:
    """The sharded model, its optimizer and its TrainStep."""

    def __init__(
        self, rank, counting=False, mesh=None, dtype=torch.float64, scheduler=True, model=None, **options
    ):
        self.rank, self.counting = rank, counting
        self.model = model or sharded_model(mesh, dtype)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.optimizer, self.scheduler = optimizers(self.model)
        if counting:
            options["expected_count"] = 10
        options.setdefault("max_grad_norm", math.inf)  # to see the norm
        self.train_step = TrainStep(self.model, self.optimizer, self.scheduler if scheduler else None, **options)

    def pieces(self, step, cut):
        """Return this rank's microbatches, by call; a cut has the numbers of all ranks, by call."""
        batches = iter(microbatches(step, self.rank, sum(sizes[self.rank] for sizes in cut)))
        return [[next(batches) for _ in range(sizes[self.rank])] for sizes in cut]

    def count(self, piece):
        return sum(int(counts.sum()) for _, _, counts in piece) if self.counting else None

    def calls(self, step, cut, function=None):
        """Make the calls of an open step, and return their metrics."""
        return [
            self.train_step.forward_backward(
                forward_step_func=function or forward_step(self.counting),
                data_iterator=iter(piece),
                num_microbatches=len(piece),
                count=self.count(piece),
                seq_length=1,  # Megatron's schedule asks for it
            )
            for piece in self.pieces(step, cut)
        ]

    def step(self, step, cut):
        with self.train_step:
            self.calls(step, cut)
            return self.train_step.finish()

    def state(self):
        """Return full parameters and gradients. They are the optimizer's, which are always sharded."""
        parameters = dict(zip(self.names, self.optimizer.param_groups[0]["params"], strict=True))
        wholes = {name: (one.detach().full_tensor(), one.grad.full_tensor()) for name, one in parameters.items()}
        return {name: (one.clone(), gradient.clone()) for name, (one, gradient) in wholes.items()}

    def is_at_rest(self):
        """Return whether there are no gradients and the parameters are sharded."""
        return all(isinstance(one, DTensor) and one.grad is None for one in self.model.parameters())


def reference(steps, cut, counting=False, max_grad_norm=None, model=None):
    """By step: norm, and parameters and gradients by name. All microbatches of all ranks at
    once; clipping as torch.nn.utils.clip_grad_norm_ documents it."""
    model = model or plain_model()
    optimizer, scheduler = optimizers(model)
    found = []
    for step in steps:
        batches = [
            batch
            for rank in range(len(cut[0]))
            for batch in microbatches(step, rank, sum(sizes[rank] for sizes in cut))
        ]
        total = sum(loss_of(model(inputs), *rest, counting) for inputs, *rest in batches)
        optimizer.zero_grad()
        (total / normalizer(step, cut, counting)).backward()
        norm = sum(float((one.grad**2).sum()) for one in model.parameters()) ** 0.5
        if max_grad_norm is not None and norm > max_grad_norm:
            for one in model.parameters():
                one.grad.mul_(max_grad_norm / (norm + 1e-6))
        optimizer.step()
        scheduler.step()
        state = {name: (one.detach().clone(), one.grad.clone()) for name, one in model.named_parameters()}
        found.append((norm, state))
    return found


def normalizer(step, cut, counting):
    """Return the number of microbatches, or the count, of all ranks."""
    numbers = [sum(sizes[rank] for sizes in cut) for rank in range(len(cut[0]))]
    if not counting:
        return sum(numbers)
    return sum(
        int(counts.sum())
        for rank, number in enumerate(numbers)
        for _, _, counts in microbatches(step, rank, number)
    )


def largest_difference(ours, theirs):
    """Return the largest difference, relative to the largest value of each parameter and each gradient."""
    assert ours.keys() == theirs.keys()
    return max(
        float((one - other).abs().max() / other.abs().max().clamp(1e-30))
        for name, pair in theirs.items()
        for one, other in zip(ours[name], pair, strict=True)
    )
