"""megatron.masks-for-training: passes in inference mode, and training passes of the same length after them."""

from __future__ import annotations

import importlib

import pytest
import torch
from rigs.diagnosed_code import GONE, of_a_rank, verdicts_of
from rigs.diagnosed_sources import assert_verdicts
from rigs.imported import run_with_megatron
from rigs.megatron.options import UNPATCHED
from rigs.megatron.save import minor

from megapatch.patches.megatron.masks_for_training import MASK, MODULE, diagnose
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


def verdicts(rank, world_size):
    module = importlib.import_module(MODULE)

    def another(sq): ...

    return verdicts_of(diagnose, module, {"another": (module, MASK, another), "gone": (module, MASK, GONE)})


def test_verdicts():
    as_it_is = ("needed", "keeps masks") if CACHES else ("fixed", "makes each mask again")
    expected = {"as it is": as_it_is, "another": ("unknown", "triu"), "gone": ("unknown", MASK)}
    assert_verdicts(of_a_rank(verdicts), expected)
