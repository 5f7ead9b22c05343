"""megatron.masks-for-training: passes in inference mode, and training passes of the same length after them."""

from __future__ import annotations

import pytest
import torch
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED
from rigs.megatron.save import minor

from megapatch.testing import init_parallel, tiny_gpt

CACHES = minor() < 16


def passes(rank, world_size, infers):
    """The losses and gradients of two passes, with one in inference mode before each; or the text of an error."""
    init_parallel()
    (chunk,) = tiny_gpt().chunks
    tokens = torch.arange(8, device="cuda").view(1, -1)
    found = []
    for _ in range(2):
        if infers:
            with torch.inference_mode():
                chunk(tokens, tokens, None)
        try:
            loss = chunk(tokens, tokens, None, labels=tokens).sum()
            loss.backward()
        except RuntimeError as error:
            return str(error)
        found.append([loss.item(), *(parameter.main_grad.tolist() for parameter in chunk.parameters())])
    return found


@pytest.mark.quick
def test_training_goes_on_after_a_pass_in_inference_mode():
    plain, broken = (run_with_megatron(passes, 1, infers, env=UNPATCHED)[0] for infers in (False, True))
    assert run_with_megatron(passes, 1, True)[0] == run_with_megatron(passes, 1, False)[0] == plain
    if CACHES:
        assert "Inference tensors cannot be saved for backward" in broken
    else:
        assert broken == plain
