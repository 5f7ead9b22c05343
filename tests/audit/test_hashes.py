"""The hash of parameters depends on every bit and its place, whatever the type and the place in memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from rigs.audit import idle_audit, part_of

from megapatch.audit._gathered_when_read import _memory_of
from megapatch.audit._hashes import WIDTHS, hash_of
from megapatch.audit._ranks_agree import RanksAgree


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


@pytest.mark.parametrize(("width", "other"), [WIDTHS, WIDTHS[::-1]])
def test_words_that_change_places_in_a_column_of_one_width_do_not_in_the_other(width, other):
    plain = torch.arange(4 * width)
    swapped = plain.clone()
    swapped[0], swapped[width] = plain[width], plain[0]
    assert hash_of([swapped], (width,)).tolist() == hash_of([plain], (width,)).tolist()
    assert hash_of([swapped], (other,)).tolist() != hash_of([plain], (other,)).tolist()


class Quantized(torch.Tensor):
    """As Transformer Engine's tensors: without memory of their own, and with few operators."""

    @staticmethod
    def __new__(cls, **parts):
        data = next(iter(parts.values()))
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)
        vars(made).update(parts)
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if "detach" in str(function):
            return cls(**vars(args[0]))
        raise NotImplementedError(str(function))


def parts(name, scale_name, byte=1, scale=1.0):
    data = torch.arange(64, dtype=torch.uint8)
    data[3] = byte
    return {name: data, scale_name: torch.full((1,), scale)}


NAMES = {"Float8Tensor": ("_data", "_scale_inv"), "MXFP8Tensor": ("_rowwise_data", "_rowwise_scale_inv")}


@pytest.mark.parametrize("kind", NAMES)
def test_of_quantized_parameters_the_bytes_count(kind):
    def hashed(*values):
        return hash_of([torch.nn.Parameter(Quantized(**parts(*NAMES[kind], *values)))]).tolist()

    assert hashed() == hashed() != hashed(2)
    assert (hashed(1, 2.0) != hashed()) == (kind == "Float8Tensor")  # blocks' scales are padded with anything


def test_fp8_itself_is_hashed_by_its_bytes():
    plain = torch.arange(8, dtype=torch.uint8)
    assert hash_of([plain.view(torch.float8_e4m3fn)]).tolist() != hash_of([plain]).tolist()


def test_what_nobody_can_hash_does_not_hide_its_group(caplog):
    unknown, known = torch.nn.Parameter(Quantized(other=torch.ones(4))), torch.nn.Parameter(torch.ones(4))
    chunk = mock.Mock()
    chunk.module.parameters = lambda: [unknown, known]
    part = part_of(idle_audit(), RanksAgree)
    for _ in range(2):
        assert [id(one) for one in part._known([chunk])] == [id(known)]
    assert caplog.text.count("of the class Quantized are not compared") == 1
    assert hash_of([unknown, known]).tolist() == hash_of([known]).tolist()


@pytest.mark.parametrize("kind", NAMES)
def test_what_is_sent_is_known_by_its_bytes(kind):
    made = parts(*NAMES[kind])
    assert made[NAMES[kind][0]].data_ptr() in _memory_of([torch.nn.Parameter(Quantized(**made))])
