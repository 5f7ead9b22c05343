"""Loads by a framework: of weights alone, which the next step has to start from."""

import torch

from megapatch.testing import init_parallel, tiny_gpt

OPTIONS = {"dtype": "bf16", "optimizer": "adam", "use_distributed_optimizer": True}
UNDONE, KEPT = [True, False], [True, True]
"""Results of `after_load` without a patch, and with it."""


def after_load(load):
    """Train a model, and let `load(trained, new)` load its weights into a new one, whose learning rate is zero.

    Return whether the new model has those weights after the load, and after one more step.
    """
    init_parallel()
    trained = tiny_gpt(**OPTIONS, lr=0.05)
    for step in range(3):
        trained.train_step(step)
    saved = trained.parameters()
    new = tiny_gpt(**OPTIONS, lr=0.0)
    load(trained, new)
    loaded = new.parameters()
    new.train_step(3)
    return [all(torch.equal(state[name], saved[name]) for name in saved) for state in (loaded, new.parameters())]
