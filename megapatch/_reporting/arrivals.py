"""The ranks that have come to a comparison, so that its failure can name the one that has died."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .._ranks import default_store, name_of, numbered
from ..errors import InconsistentError

_calls: Counter[str] = Counter()


@contextlib.contextmanager
def naming_the_missing(group: Any) -> Iterator[None]:
    """Note in the store that this rank has come, and name the ranks that have not if the collective below fails.

    Raises:
        InconsistentError: from torch's own error.
    """
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    name = name_of(ranks)
    keys = {rank: f"megapatch.agreement/{name}/{rank}" for rank in ranks}
    _calls[name] += 1
    number = _calls[name]  # a collective: every rank counts the same
    with contextlib.suppress(Exception):  # without a store nobody is named; the comparison needs none
        default_store().set(keys[dist.get_rank()], str(number))
    try:
        yield
    except RuntimeError as error:  # torch.distributed's are
        raise InconsistentError(f"ranks could not be compared: {_who(keys, number)}") from error


def _who(keys: dict[int, str], number: int) -> str:
    try:
        store = default_store()
        missing = [
            rank for rank, key in keys.items() if not (store.check([key]) and int(store.get(key)) >= number)
        ]
    except Exception:
        return "torch.distributed's store is gone, too, perhaps with the rank that holds it (usually rank 0)"
    if missing:
        return f"{numbered('rank', missing)} had not come; look for why it died, or what it waits for"
    return "all ranks had come, and one has died since, or cannot be reached"
