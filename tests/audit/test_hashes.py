"""The hash of parameters depends on every bit and its place, whatever the type and the place in memory."""

from __future__ import annotations

import pytest
import torch

from megapatch.audit._hashes import hash_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 1023, 1024 * 4 + 5, 1024 * 16])
def test_every_element_counts_at_its_place(dtype, size):
    plain = (torch.arange(size) % 100).to(dtype)
    known = hash_of([plain]).tolist()
    assert hash_of([plain.clone()]).tolist() == known
    assert hash_of([torch.cat([plain[:1], plain])[1:]]).tolist() == known  # not aligned
    for place in {0, size // 2, size - 1}:
        changed = plain.clone()
        changed[place] += 1
        assert hash_of([changed]).tolist() != known
    if size > 1:
        assert hash_of([plain.flip(0)]).tolist() != known
        assert hash_of([plain[:-1], plain[-1:]]).tolist() != known


def test_parameters_are_told_apart():
    one, other = torch.ones(16), torch.zeros(16)
    assert hash_of([one, other]).tolist() != hash_of([other, one]).tolist()
