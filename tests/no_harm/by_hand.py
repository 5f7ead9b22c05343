"""Programs of what people do by hand, and with classes of their own, around one normal call of Megatron's."""

from __future__ import annotations

from unittest import mock

import torch

from megapatch.testing._data import forward_step

from .table import program
from .trainer import parts_of


def with_adam(run, kind):
    """Build a model whose inner optimizer is of this class."""
    with mock.patch.object(torch.optim, "AdamW", kind):
        trainer = run.trainer()
    assert all(type(part.optimizer) is kind for part in parts_of(trainer.optimizer))
    return trainer


def backward(trainer, data, loss_of_own=lambda: 0.0):
    """Run one microbatch forward and backward, without a schedule."""
    (chunk,) = trainer.model.chunks
    output, loss_function = forward_step(iter(trainer.model.microbatches(data, 1)), chunk, two_tuple=True)
    loss, _ = loss_function(output)
    trainer.run.note("loss", loss.detach())
    (loss + loss_of_own()).backward()


# ------------------------------------------------------------------------------------ optimizers of one's own
class Listing(torch.optim.AdamW):
    """Lists its parameters when state is loaded, which Megatron does once its shards are in the groups."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.listed = [group["params"][:] for group in self.param_groups]

    def step(self, closure=None):
        given = [group["params"] for group in self.param_groups]
        for group, listed in zip(self.param_groups, self.listed, strict=True):
            group["params"] = listed
        result = super().step(closure)
        for group, parameters in zip(self.param_groups, given, strict=True):
            group["params"] = parameters
        return result


@program("fp32, sharded", "bf16, sharded", "fp32, sharded, overlaps")
def an_optimizer_that_lists_its_parameters_when_state_is_loaded(run):
    with_adam(run, Listing).train(0, 1)


@program("fp32, sharded", "bf16, sharded", "bf16")
def a_norm_of_what_the_optimizer_trains(run):
    trainer = run.trainer()
    trained = [
        each for part in parts_of(trainer.optimizer) for group in part.param_groups for each in group["params"]
    ]
    run.note("trained", [(each.requires_grad, each.is_leaf, list(vars(each))) for each in trained])
    trainer.train(0)


# ------------------------------------------------------------------------------------ experts
@program("moe")
def a_loss_on_the_probabilities_that_a_dispatcher_keeps(run):
    trainer = run.trainer()
    (chunk,) = trainer.model.chunks
    modules = list(chunk.modules())
    dispatchers = [each.token_dispatcher for each in modules if hasattr(each, "token_dispatcher")]
    trainer.train(9)
    for data in range(2):
        trainer.model.zero_grad()
        backward(trainer, data, lambda: 10 * sum((each.probs**2).sum() for each in dispatchers))
        trainer.model.config.finalize_model_grads_func([chunk], None)
        trainer.update()
