"""megatron.save-plan-cache on many ranks, of which only the agreement can be tried here."""

from types import SimpleNamespace
from unittest import mock

import torch

from megapatch.patches.megatron.save_plan_cache import _changed_anywhere


def of_256_ranks(tensor, op=torch.distributed.ReduceOp.SUM):
    """Reduce what 256 ranks alike hold: in 8 bits their sum is 0."""
    if op == torch.distributed.ReduceOp.SUM:
        tensor.mul_(torch.tensor(256).to(tensor.dtype))


def test_a_change_on_256_ranks_is_a_change():
    with (
        mock.patch("torch.distributed.get_backend", return_value="gloo"),
        mock.patch("torch.distributed.all_reduce", of_256_ranks),
    ):
        assert _changed_anywhere(SimpleNamespace(), [("a",)], cached=True)
