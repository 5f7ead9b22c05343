"""Where two records of a program differ, to the bit, in words."""

from __future__ import annotations

import torch


def different(plain, other):
    """Return, by kind, what differs on any rank, in words. Of a program that failed, that is the failure."""
    for mode, record in (("plain", plain), ("not plain", other)):
        if isinstance(record, str):
            return {f"failed, {mode}": record}
    found = {}
    for rank, (one, two) in enumerate(zip(plain, other, strict=True)):
        for key in dict.fromkeys([*one, *two]):
            kind, name = key
            if not same(one.get(key), two.get(key)):
                found.setdefault(kind, []).append(f"rank {rank}, {name}: {in_words(one.get(key), two.get(key))}")
    return {kind: f"{len(places)}, {places[0]}" for kind, places in found.items()}


def same(one, two):
    """Return whether two values have the same type and the same bits."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if torch.is_tensor(one) and torch.is_tensor(two):
        alike = (one.dtype, one.shape) == (two.dtype, two.shape)
        return alike and torch.equal(_bits(one), _bits(two))
    if isinstance(one, float) and isinstance(two, float):
        return one.hex() == two.hex()
    return type(one) is type(two) and one == two


def _bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def in_words(one, two):
    if torch.is_tensor(one) and torch.is_tensor(two) and one.shape == two.shape:
        return f"off by {(one.float() - two.float()).abs().max():.3g}"
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        places = zip([*one, *[None] * len(two)], [*two, *[None] * len(one)], strict=False)
        place, (mine, other) = next((place, pair) for place, pair in enumerate(places) if not same(*pair))
        return f"of {len(one)} and {len(two)}, number {place}: {in_words(mine, other)}"
    if isinstance(one, dict) and isinstance(two, dict):
        name = next(name for name in [*one, *two] if not same(one.get(name), two.get(name)))
        return f"{name}: {in_words(one.get(name), two.get(name))}"
    return f"{str(one)[:200]} instead of {str(two)[:200]}"
